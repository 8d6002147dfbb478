"""Reports: a result as one HTML file that needs no network."""

from trainatomy.lazy import lazy

NAMES = {"reporters.html.page": "to_html, Reported"}
__getattr__, __dir__, __all__ = lazy(__name__, NAMES)
