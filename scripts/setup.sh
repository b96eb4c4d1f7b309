# Sourced by scripts/run and scripts/test. Makes .venv with the pinned dependencies and this
# checkout installed in editable mode; does nothing when that is already done.
#
#   PYTHON   the Python to make .venv from; by default the first that works of
#            python3.11, python3.12, python3.13, python3, python, python3.14 (for the last
#            megatron-core has no wheels: pip builds it, which needs a C++ compiler)

TORCH_VERSION=2.13.0
VENV="$ROOT/.venv"
CONSTRAINTS="$ROOT/requirements/constraints.txt"
STAMP="$VENV/.installed"

say() { printf '[setup] %s\n' "$*" >&2; }

fail() {
    printf '[setup] error: %s\n' "$*" >&2
    exit 1
}

is_usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name candidate
    if [ -n "${PYTHON:-}" ]; then
        is_usable_python "$PYTHON" ||
            fail "PYTHON=$PYTHON does not run as Python 3.11 or later with venv; set it to one that does"
        printf '%s\n' "$PYTHON"
        return
    fi
    # Every match on the path: a version manager's shim may exist and not run.
    for name in python3.11 python3.12 python3.13 python3 python python3.14; do
        while IFS= read -r candidate; do
            if is_usable_python "$candidate"; then
                printf '%s\n' "$candidate"
                return
            fi
        done < <(type -aP "$name")
    done
    fail "found no Python 3.11 or later with its venv module; install one (on Debian and Ubuntu" \
        "also python3-venv), or set PYTHON to it"
}

# Installs are --no-compile: most files are never imported, and Python compiles those that are.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

install_torch() {
    local log
    if [ "$1" = gpu ] || [ "$(uname -s)" != Linux ]; then
        say "installing torch $TORCH_VERSION"
        # A CPU build from before there was a GPU would satisfy pip.
        if pip show torch 2>/dev/null | grep '^Version:.*+cpu' >/dev/null; then
            pip uninstall --yes torch >&2
        fi
        await_pins
        pip install --no-compile -c "$CONSTRAINTS" "torch==$TORCH_VERSION" >&2
        return
    fi
    say "no usable NVIDIA GPU: installing the CPU build of torch $TORCH_VERSION"
    log="$VENV/torch-cpu.log"
    # Its dependencies come with the others.
    if pip install --no-compile --no-deps "torch==$TORCH_VERSION+cpu" >&2 2>"$log"; then
        return
    fi
    say "pip found no CPU build: $(tail -n 1 "$log")"
    say "falling back to plain torch $TORCH_VERSION, which on Linux may be the CUDA build: gigabytes."
    say "To avoid that, stop here, add PyTorch's CPU wheel index (see pytorch.org) to pip's"
    say "extra-index-url, for example in PIP_EXTRA_INDEX_URL, and run this again."
    await_pins
    pip install --no-compile -c "$CONSTRAINTS" "torch==$TORCH_VERSION" >&2
}

# All but torch, as two halves at a time. What fails here, the install that comes last tries again,
# and says why.
install_pins() {
    local half
    for half in '[a-mA-M]' '[n-zN-Z]'; do
        grep "^$half" "$CONSTRAINTS" | grep -v '^torch==' >"$VENV/pins-$half.txt"
        pip install --quiet --no-compile --no-deps -r "$VENV/pins-$half.txt" >/dev/null 2>&1 &
    done
    wait
}

# A pip that installs what torch needs too has to wait: two would write the same files.
await_pins() { wait "$PINS" 2>/dev/null || true; }

setup() {
    local kind stamp python
    kind=cpu
    if nvidia-smi -L >/dev/null 2>&1; then kind=gpu; fi
    stamp="$kind $ROOT $(cat "$CONSTRAINTS" "$ROOT/setup.py" "$ROOT/pyproject.toml" \
        "$ROOT/scripts/setup.sh" | cksum)"
    if [ -x "$VENV/bin/megatron-async" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$stamp" ]; then
        say "using $VENV, which is up to date"
        return
    fi
    rm -f "$STAMP"
    if ! is_usable_python "$VENV/bin/python"; then
        python="$(find_python)"
        say "making $VENV with $python ($("$python" --version))"
        "$python" -m venv --clear "$VENV"
    fi
    say "installing dependencies pinned in requirements/constraints.txt; the first time takes minutes"
    # The pip that Python brings looks at each file of each package's index, for twice the time.
    pip install --quiet --no-compile -c "$CONSTRAINTS" pip setuptools >&2
    install_pins &
    PINS=$!
    install_torch "$kind"
    await_pins
    # Setuptools warns of the folders of data inside the package.
    PYTHONWARNINGS=ignore pip install --quiet --no-compile -c "$CONSTRAINTS" --no-build-isolation \
        --editable "$ROOT[test]" >&2
    printf '%s\n' "$stamp" >"$STAMP"
    say "done"
}

setup
