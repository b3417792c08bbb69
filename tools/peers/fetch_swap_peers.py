"""Put the files that `hotrack bench swap` needs of its peers into a folder, about 3 MiB.

    python tools/peers/fetch_swap_peers.py .peers

Downloads two wheels (for Linux x86-64) with pip into a temporary folder, takes out torch_memory_saver and
vLLM's 27 KB allocator, and throws the rest away. vLLM's wheel has some 340 MB.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PLATFORMS = (
    "manylinux2014_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_35_x86_64",
)

# Requirement: beginnings of the names to keep. torch_memory_saver's libraries are per CUDA version; preload
# libraries are for a mode that is not used.
WANTED = {
    "torch-memory-saver==0.0.10": ("torch_memory_saver/", "torch_memory_saver_hook_mode_torch_cu"),
    "vllm==0.33.0": ("vllm/cumem_allocator.abi3.so",),
}


def download(requirement: str, folder: Path) -> Path:
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    abis = [option for name in ("cp312", "abi3", "none") for option in ("--abi", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *abis, *platforms]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, beginnings: Sequence[str], destination: Path) -> int:
    """Returns bytes written."""
    written = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(tuple(beginnings)):
                archive.extract(member, destination)
                written += member.file_size
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("destination", type=Path)
    destination = parser.parse_args().destination
    for requirement, beginnings in WANTED.items():
        with tempfile.TemporaryDirectory() as folder:
            wheel = download(requirement, Path(folder))
            written = unpack(wheel, beginnings, destination)
        print(f"{requirement}: {written / 2**20:.2f} MiB in {destination}")


if __name__ == "__main__":
    main()
