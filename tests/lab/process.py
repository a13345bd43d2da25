"""One process of several: runs the command line and reports which parts of tensors it read.

    python -m tests.lab.process REPORT ARGUMENT...

REPORT gets {path: [[[start, stop], ...] of each read]}.
"""

import json
import sys
from pathlib import Path

from deepinfer_jax import cli
from deepinfer_jax.runtime.checkpoint import Official


class Watched(Official):
    """Notes every region that it is asked for."""

    regions: dict[str, list] = {}

    def read(self, path, region):
        bounds = [[axis.start, axis.stop] for axis in region]
        self.regions.setdefault(path, []).append(bounds)
        return super().read(path, region)


if __name__ == "__main__":
    from deepinfer_jax.runtime import checkpoint

    checkpoint.Official = Watched
    code = cli.main(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(Watched.regions))
    sys.exit(code)
