"""`python -m isthmus`, the same as `isthmus`."""
import sys

from .core.cli.main import main

sys.exit(main())
