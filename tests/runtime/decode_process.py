"""The decode end of two processes: goes on with frames from a socket and reports the bits.

    python -m tests.runtime.decode_process FOLDER PORT REPORT

REPORT gets {number of the request: `runs.bits` of its result}.
"""

import json
import socket
import sys
from pathlib import Path

from deepinfer_jax.runtime import transport
from tests.runtime import small_model
from tests.runtime.runs import bits

if __name__ == "__main__":
    folder, port, report = sys.argv[1:]
    options = (("prefix_cache", False), ("speculate", None))
    engine = small_model.engine(Path(folder), small_model.numerics(invariant=True), options)
    with socket.create_connection(("localhost", int(port))) as connection:
        found = {n: bits(out) for n, out in engine.resumed(transport.receive(connection))}
    Path(report).write_text(json.dumps(found))
