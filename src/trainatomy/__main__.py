"""``python -m trainatomy``."""

from trainatomy.faces.cli import run

if __name__ == "__main__":
    run()
