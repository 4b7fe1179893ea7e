"""The GPUs that are compiled for, as XLA wants them described (GpuTargetConfig).

What is written here was read from the data sheets and from XLA's own descriptions; it decides
instructions, shared memory and how work is split, but no speed is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.backend import Gpu

KIB = 1 << 10

H200_CONFIG = """\
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4814400000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {
    major: 9
  }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info {
  major: 9
  minor: 8
}
device_description_str: "NVIDIA H200"
"""
A100_CONFIG = """\
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 167936
  threads_per_core_limit: 2048
  core_count: 108
  fpus_per_core: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 2039000000000
  l2_cache_size: 41943040
  clock_rate_ghz: 1.41
  device_memory_size: 85899345920
  shared_memory_per_block_optin: 166912
  cuda_compute_capability {
    major: 8
  }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info {
  major: 8
  minor: 8
}
device_description_str: "NVIDIA A100-SXM4-80GB"
"""


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU."""

    name: str  # as on the command line
    device_kind: str  # as JAX names the device
    arch: str  # as ptxas names it
    gpu: Gpu  # whose tiles are taken
    config: str  # GpuTargetConfig, text form
    shared_limit_bytes: int  # of one block, for our kernels


H200 = Target("h200", "NVIDIA H200", "sm_90a", "sm_90", H200_CONFIG, 227 * KIB)
A100 = Target("a100", "NVIDIA A100", "sm_80", "sm_80", A100_CONFIG, 99 * KIB)
"""The A100 has 163 KiB; its tiles are also those of Ada and of smaller Ampere cards, with 99."""

TARGETS = {target.name: target for target in (H200, A100)}
