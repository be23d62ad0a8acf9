"""The helper modules beside the tests of engines can be imported: they are scripts as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
