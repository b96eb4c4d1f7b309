"""Which files are installed; everything else that a package says stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["megatron_async", "megatron_async.*"]),
    package_data={
        "megatron_async": [
            "py.typed",
            "__init__.pyi",
            "megatron_api/__init__.pyi",
            "assets/**",
            "cli/options/*.json",
            "kernels/*/*.cu*",
            "kernels/*/*.json",
            "serving/page/*.html",
            "verify/*.toml",
        ],
    },
)
