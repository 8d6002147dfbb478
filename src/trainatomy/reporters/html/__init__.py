"""Reports: a result as one HTML file that needs no network."""

from trainatomy.reporters.html.page import Reported, to_html

__all__ = ["Reported", "to_html"]
