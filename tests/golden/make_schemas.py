"""Writes the JSON schemas that transformers makes of the functions of tests/tool_functions.py.

pip install transformers && PYTHONPATH=tests python tests/golden/make_schemas.py
"""

import json
from pathlib import Path

from tool_functions import FUNCTIONS
from transformers.utils import get_json_schema


def main() -> None:
  folder = Path(__file__).parent / "tools"
  folder.mkdir(exist_ok=True)
  schemas = [get_json_schema(function) for function in FUNCTIONS]
  (folder / "schemas.json").write_text(json.dumps(schemas, indent=1) + "\n")


if __name__ == "__main__":
  main()
