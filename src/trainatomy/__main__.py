"""``python -m trainatomy``."""

import sys

try:
    from trainatomy.cli import run
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    run()
