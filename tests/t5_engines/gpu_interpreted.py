"""Runs the gather kernel in Triton's interpreter: `TRITON_INTERPRET=1 python gpu_interpreted.py`.

Memory of a CPU stands for pinned memory. A process of its own, since Triton decides when it is
imported whether it interprets.
"""

from __future__ import annotations

from test_gpu_copies import Model

from kvfs.gpu.gather import Gather


def main() -> None:
    for seed in range(24):
        model = Model(seed, 1 + seed % 7, 1 + seed % 4)
        assert model.swap(Gather(), pinned=True) == model.blocks, seed
        assert not model.wrong(), seed
    print("24 layouts")


if __name__ == "__main__":
    main()
