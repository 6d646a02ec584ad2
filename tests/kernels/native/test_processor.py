"""What a /proc/cpuinfo says: Intel's, AMD's, an Arm, and none."""

import platform

from recserve.kernels.native.processor import parse_cpuinfo

INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) CPU @ 2.50GHz
flags\t\t: fpu avx2 avx512f
bugs\t\t: spectre_v1

processor\t: 1
vendor_id\t: AuthenticAMD
flags\t\t: amx_bf16
"""
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd4f\n"


def test_the_first_processor_of_several():
    found = parse_cpuinfo(INTEL)
    assert found.name == "Intel(R) Xeon(R) CPU @ 2.50GHz"
    assert found.flags == {"fpu", "avx2", "avx512f"}


def test_an_arm_has_features_and_no_name():
    found = parse_cpuinfo(ARM)
    assert found.flags == {"fp", "asimd", "bf16"}
    assert found.name == (platform.processor() or platform.machine())


def test_a_system_that_says_nothing():
    found = parse_cpuinfo("")
    assert found.name and not found.flags
