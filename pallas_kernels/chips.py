"""What the chips offer, from their data sheets."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device of a chip offers: bf16 operations/s, bytes of memory and bytes/s of it, from its data sheet.

    fast_memory: bytes of VMEM of a TPU core, or of shared memory that a block of threads may have. cores: of a TPU
    device, which share a kernel's parallel blocks. A TPU7x chip is two devices.
    """

    name: str
    platform: str
    topology: str
    flops: float
    memory: float
    bandwidth: float
    fast_memory: int
    cores: int = 1


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", "v5e:2x2", 197e12, 16 * 2**30, 819e9, 128 * 2**20),
        Chip("v5p", "tpu", "v5p:2x2x1", 459e12, 95 * 2**30, 2765e9, 64 * 2**20, cores=2),
        Chip("v6e", "tpu", "v6e:2x2", 918e12, 32 * 2**30, 1640e9, 128 * 2**20),
        Chip("tpu7x", "tpu", "tpu7x:2x2x1", 1153.5e12, 96 * 2**30, 3690e9, 64 * 2**20),
        Chip("h100", "cuda", "1x1x1", 989e12, 80e9, 3350e9, 232448),
        Chip("h200", "cuda", "1x1x1", 989e12, 141e9, 4800e9, 232448),
    )
}
