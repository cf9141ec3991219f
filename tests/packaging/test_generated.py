"""Generated code that is committed is what its generator makes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_schemas_pb_is_what_scripts_proto_makes(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([ROOT / "scripts/proto", tmp_path], env={**os.environ, "PATH": path}, check=True)
    made = {file.name: file.read_text() for file in (tmp_path / "spur_events/schemas/pb").iterdir()}
    committed = {file.name: file.read_text() for file in (ROOT / "schemas/pb").glob("*_pb2.py*")}
    assert made, "nothing was made"
    assert committed == made, "run scripts/proto and commit what it writes"
