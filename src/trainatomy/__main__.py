"""``python -m trainatomy``."""

from trainatomy.cli import run

if __name__ == "__main__":
    run()
