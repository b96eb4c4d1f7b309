"""Package metadata. Nothing but ``megatron_async`` is installed: ``inference/`` goes inside it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """``__version__`` of megatron_async/version.py, without importing the package."""
    text = (ROOT / "megatron_async" / "version.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("megatron_async/version.py has no __version__")
    return found[1]


SERVER = ["fastapi", "httptools", "msgspec", "prometheus-client", "pyzmq", "uvicorn"]
SERVER += ["uvloop; sys_platform != 'win32'"]

setup(
    name="megatron-async",
    version=version(),
    description="Asynchronous decoding of megatron-core models: the GPU never waits for the host",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["megatron_async", "megatron_async.*"]),
        *(f"megatron_async.{name}" for name in find_packages(include=["inference", "inference.*"])),
    ],
    package_dir={"megatron_async.inference": "inference"},
    package_data={
        "megatron_async": [
            "py.typed",
            "assets/**",
            "kernels/*/*.cu*",
            "kernels/*/*.json",
            "serving/page/*.html",
        ],
        "megatron_async.inference": ["verify/scenarios.toml", "cli/megatron_flags.json"],
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.9,<3",
        # Python 3.11 has 0.16.1 alone; later releases need 3.12.
        "megatron-core>=0.16.1,<0.20",
        "jinja2>=3.1.6",
        "llguidance>=1.9,<2",
        "numpy",
        "packaging",
        "psutil",
        "safetensors",
        "tokenizers",
        "tqdm",
    ],
    extras_require={
        "cuda": ["cuda-bindings", "triton"],
        "plot": ["matplotlib"],
        # Several engines behind one server.
        "replicas": [*SERVER, "ray[serve]>=2.56,<3"],
        "server": SERVER,
        # The SDK, and the exporter of OTLP by HTTP.
        "tracing": ["fastapi[opentelemetry]>=0.165"],
        "test": [
            *SERVER,
            "httpx",
            "hypothesis",
            "matplotlib",
            "mypy",
            "openai",
            "opentelemetry-sdk",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",
            "ruff",
            "schemathesis",
            "setuptools>=77",
            "transformers",
            # Its interpreter runs the kernels where there is no GPU.
            "triton; platform_system == 'Linux'",
        ],
    },
    entry_points={"console_scripts": ["megatron-async = megatron_async.__main__:main"]},
    zip_safe=False,
)
