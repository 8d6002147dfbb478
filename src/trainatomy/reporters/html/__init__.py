"""Reports: a result as one HTML file that needs no network."""

from trainatomy.reporters.html.page import Reported, report

__all__ = ["Reported", "report"]
