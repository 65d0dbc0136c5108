"""Example environments: one small package each, with tasks, README and test.

An installed wheel has them next to this file. In a checkout they are in the folder `environments/` at the top.
"""

from pathlib import Path

if not Path(__file__).with_name("calculator").is_dir():
    __path__.append(str(Path(__file__).parents[2] / "environments"))
