"""``python -m simulator``."""

from __future__ import annotations

import sys

from simulator.command import main

sys.exit(main())
