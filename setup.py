"""Which files are installed; everything else that a package says stands in pyproject.toml.

Nothing but ``megatron_async`` is installed: ``inference/`` goes inside it.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megatron_async", "megatron_async.*"]),
        *(f"megatron_async.{name}" for name in find_packages(include=["inference", "inference.*"])),
    ],
    package_dir={"megatron_async.inference": "inference"},
    package_data={
        "megatron_async": [
            "py.typed",
            "__init__.pyi",
            "megatron_api/__init__.pyi",
            "assets/**",
            "kernels/*/*.cu*",
            "kernels/*/*.json",
            "serving/page/*.html",
        ],
        "megatron_async.inference": ["verify/scenarios.toml", "cli/megatron_flags.json"],
    },
)
