"""Fills the virtual environment that runs it: the engine's wheel, all dependencies, and meshswarm itself (editable).

The rule this file keeps: nothing counts as done before it is. Wheels are moved into the cache whole, and the stamp that
lets the next start skip everything is written last. Only the standard library is used, since nothing else is there yet.

llama-cpp-python comes as source: compiling it takes 6 to 9 minutes on two cores, for the instruction set of the CPU it
is compiled on. So its wheel is kept, in a folder named after that CPU and the build's settings: the same home folder on
another machine gets a wheel of its own instead of one that dies with an illegal instruction, and each back-end
(`backends.py`) has one too. A GPU back-end that cannot be built is replaced by the CPU's, with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from backends import VARIABLE, Backend, Choice, Machine, choose, look

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(sys.prefix)
SCRIPTS = ("setup", "setup_venv.py", "backends.py")
ENGINE = "llama-cpp-python"
FAILURE = "failed.txt"
ENGINE_NOTE = VENV / "meshswarm-engine.json"
"""What the engine here was built for and why: `meshswarm doctor` says it."""
BUILD_SETTINGS = ("CMAKE_ARGS", "FORCE_CMAKE", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")
# What a compiler may use on its own under -march=native; flags of the kernel or the hypervisor are left out.
X86_INSTRUCTION_SETS = re.compile(
    r"(pni|s?sse\w*|avx\w*|fma\w*|f16c|bmi\d|abm|popcnt|movbe|adx|v?aes|v?pclmulqdq|gfni|sha_ni|amx\w*|cx16|lahf_lm)"
)
# How ggml names what it was compiled for, and how Linux names what the CPU can do.
CPU_FLAG_OF_FEATURE = {
    "SSE3": "pni", "SSSE3": "ssse3", "AVX": "avx", "AVX_VNNI": "avx_vnni", "AVX2": "avx2", "F16C": "f16c", "FMA": "fma",
    "BMI2": "bmi2", "AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8", "NEON": "asimd", "FP16_VA": "asimdhp", "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm", "SVE": "sve", "SME": "sme",
}  # fmt: skip
# Run with the path of libllama: prints the features it was compiled for, or dies of them.
PROBE = """
import ctypes, sys
system_info = ctypes.CDLL(sys.argv[1]).llama_print_system_info
system_info.restype = ctypes.c_char_p
print(system_info().decode())
"""


def main() -> None:
    extras = sys.argv[1]
    stamp = VENV / f"setup-{extras}.stamp"
    choice = chosen_backend(extras)
    state = state_of_the_checkout(choice)
    if any(_text(VENV / f"setup-{done}.stamp") == state + failed_build(choice) for done in {extras, "dev"}):
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        say(f"installing meshswarm and its dependencies into {VENV}")
        for old in VENV.glob("setup-*.stamp"):  # what they vouch for is about to change
            old.unlink()
        install_requirements_of_the_build()
        install_engine(choice)
        install_package(extras)
        stamp.write_text(state + failed_build(choice))
        say("done")
    except KeyboardInterrupt:
        fail("interrupted; the next start goes on from here", status=130)
    except subprocess.CalledProcessError as error:
        fail(f"`{' '.join(map(str, error.cmd))}` failed with exit status {error.returncode}; see above")


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def fail(message: str, *, status: int = 1) -> NoReturn:
    print(f"setup: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def chosen_backend(extras: str) -> Choice:
    """The tests run on the CPU, where results can be compared bit by bit; so does all that has build arguments of its
    own, of which only their author knows what they are for."""
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if not wanted:
        wanted = "cpu" if extras == "dev" or os.environ.get("CMAKE_ARGS") else "auto"
    try:
        return choose(look() if wanted != "cpu" else Machine(platform.system()), wanted)
    except ValueError as error:
        fail(f"{error}; or choose another back-end, or {VARIABLE}=cpu")


def state_of_the_checkout(choice: Choice) -> str:
    """A digest of all that decides what must be in the environment: native sources too, Python sources need not."""
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "scripts" / name for name in SCRIPTS)]
    sources += sorted((ROOT / "src").rglob("*.c")) + sorted((ROOT / "src").rglob("*.h"))
    digest = hashlib.sha256(json.dumps([str(ROOT), sys.version, build_key(choice)]).encode())
    for path in sources:
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.relative_to(ROOT)} {len(content)} ".encode() + content)
    return digest.hexdigest()


# -- the package


def pip(*arguments: str) -> None:
    """Run pip; show the steps it takes, and all it said when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    output = []
    with running(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if step := re.match(r"\s*(Collecting|Processing|Building|Installing)\b.*", line):
                print(f"  {shortened(step[0].strip())}", flush=True)
    if process.returncode:
        print("".join(output), file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, command)


def shortened(line: str, width: int = 160) -> str:
    """The line, or as many whole words of it as fit, with a sign that there are more."""
    return line if len(line) <= width else f"{line[: width - 3].rpartition(' ')[0].rstrip(',')} ..."


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A child process whose whole family ends with this block, however the block ends."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
        process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def requirements() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {"build": project["build-system"]["requires"], "project": project["project"]["dependencies"]}


def install_requirements_of_the_build() -> None:
    """Into the environment itself, so that later rebuilds of the native part need no network."""
    pip("install", *requirements()["build"])


def install_package(extras: str) -> None:
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        version = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        if not install_debian_packages(version):
            say(f"Python's headers are missing (Debian: {version}), so the native tap is left out and steps are slower")
    if extras == "dev" and sys.platform == "linux" and not (shutil.which("nft") and shutil.which("ip")):
        if not install_debian_packages("nftables", "iproute2"):
            say("nftables or iproute2 are missing: the tests on an emulated wide-area network are skipped")
    target = f"{ROOT}[dev]" if extras == "dev" else str(ROOT)
    pip("install", "--no-build-isolation", "--editable", target)


def install_debian_packages(*names: str) -> bool:
    """True when they are there now; False where that is not ours to do (no Debian, not root) or failed."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return False
    say(f"installing Debian packages: {' '.join(names)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *names]):
        if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
            return False
    return True


# -- the engine's wheel


def cpu_flags() -> set[str]:
    """What the CPU can do, in Linux's words; empty where the system does not say."""
    cpuinfo = _text(Path("/proc/cpuinfo")) or ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return set(found[1].split()) if found else set()


def cpu_name() -> str:
    """What two machines must share to share a natively compiled wheel."""
    flags = cpu_flags()
    if platform.machine().lower() in ("x86_64", "amd64", "i686"):
        flags = {flag for flag in flags if X86_INSTRUCTION_SETS.fullmatch(flag)}
    if flags:
        return " ".join(sorted(flags))
    if sys.platform == "darwin":
        query = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor()


def build_environment(choice: Choice) -> dict[str, str]:
    """What the build is given: the environment, with what the back-end needs on top."""
    arguments = f"{os.environ.get('CMAKE_ARGS', '')} {choice.cmake_arguments}".strip()
    return {**os.environ, **choice.environment, **({"CMAKE_ARGS": arguments} if arguments else {})}


def build_key(choice: Choice) -> str:
    environment = build_environment(choice)
    settings = {name: environment.get(name, "") for name in BUILD_SETTINGS}
    portable = "GGML_NATIVE=OFF" in settings["CMAKE_ARGS"].upper()
    what = [settings, platform.libc_ver(), "any" if portable else cpu_name()]
    return f"{sysconfig.get_platform()}-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]}"


def wheels_folder() -> Path:
    if named := os.environ.get("MESHSWARM_CACHE"):
        return Path(named) / "wheels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshswarm/wheels"


def install_engine(choice: Choice) -> None:
    """The engine for the chosen back-end; for the CPU, with the reason, where that one cannot be built."""
    requirement = next(line for line in requirements()["project"] if line.startswith(ENGINE))
    folder = wheels_folder()
    with locked(folder):
        if choice.backend is not Backend.CPU:
            say(f"the engine is for {choice.backend.value}: {choice.why}")
        try:
            install_build(folder, choice, requirement)
        except BuildError as error:
            if choice.backend in (Backend.CPU, Backend.METAL):
                fail(f"building {ENGINE} failed: {error}")
            choice = Choice(Backend.CPU, f"building for {choice.backend.value} failed: {error}")
            say(f"{choice.why}. Going on with the CPU alone")
            try:
                install_build(folder, choice, requirement)
            except BuildError as cpu_error:
                fail(f"building {ENGINE} failed: {cpu_error}")
    ENGINE_NOTE.write_text(json.dumps({"backend": choice.backend.value, "why": choice.why}))


class BuildError(Exception):
    """The wheel could not be made; the message says why and where to read on."""


def install_build(folder: Path, choice: Choice, requirement: str) -> None:
    """Install the kept wheel of this build, or make it. A build that failed once is not tried again by itself."""
    kept = folder / build_key(choice)
    if install_from(kept, requirement):
        check_that_it_loads(choice)
        return
    if reason := failed_build(choice):
        raise BuildError(reason)
    kept.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as building:
            wheel = wheel_lying_around(folder, choice) or build_wheel(Path(building), choice, requirement)
            wheel.replace(kept / wheel.name)
    except BuildError as error:
        if choice.cmake_arguments:
            (kept / FAILURE).write_text(f"{error} (remove {kept / FAILURE} to try it again)")
        raise
    if not install_from(kept, requirement):
        fail(f"the wheel {kept / wheel.name} cannot be installed; remove it and start again")
    check_that_it_loads(choice)


def check_that_it_loads(choice: Choice) -> None:
    """A GPU's libraries may have gone since they were built against. Raises BuildError then."""
    if not choice.cmake_arguments:
        return
    loaded = subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    if loaded.returncode:
        words = loaded.stderr.strip().splitlines() or [f"exit status {loaded.returncode}"]
        raise BuildError(f"it does not load here: {words[-1]}")


def failed_build(choice: Choice) -> str:
    """Why this build failed before; empty when it did not."""
    return _text(wheels_folder() / build_key(choice) / FAILURE) or ""


def install_from(kept: Path, requirement: str) -> bool:
    """Install the wheel in `kept` that fits `requirement` and this Python; False when there is none."""
    if not any(kept.glob("*.whl")):
        return False
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--force-reinstall", "--find-links", str(kept), requirement]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
        return False
    say(f"took {ENGINE} from {kept}")
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One set-up at a time builds; the others wait for its wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"another set-up is at work on {ENGINE}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in folder.glob("building-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        yield


def wheel_lying_around(folder: Path, choice: Choice) -> Path | None:
    """A wheel that somebody put into the folder itself, if it runs here; only it knows how it was built."""
    if build_environment(choice).get("CMAKE_ARGS"):
        return None
    for wheel in sorted(folder.glob("llama_cpp_python-*.whl"), reverse=True):
        if runs_here(wheel):
            return wheel
        say(f"{wheel} was built for another kind of CPU and is left alone")
    return None


def runs_here(wheel: Path) -> bool:
    """Whether this CPU has all that the wheel was compiled for. Asked in a child process, which may die of it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            zipfile.ZipFile(wheel).extractall(folder)
        except (zipfile.BadZipFile, OSError):
            return False
        suffix = "dylib" if sys.platform == "darwin" else "so"
        library = Path(folder) / f"llama_cpp/lib/libllama.{suffix}"
        probe = subprocess.run([sys.executable, "-c", PROBE, str(library)], capture_output=True, text=True, check=False)
    if probe.returncode:
        return False
    features = set(re.findall(r"(\w+) = 1", probe.stdout))
    flags = cpu_flags()
    return not flags or all(CPU_FLAG_OF_FEATURE[feature] in flags for feature in features & CPU_FLAG_OF_FEATURE.keys())


def build_wheel(building: Path, choice: Choice, requirement: str) -> Path:
    """A wheel for this machine, made in the folder `building`."""
    compilers = (os.environ.get("CXX") or "c++", "g++", "clang++")
    if not any(map(shutil.which, compilers)) and not install_debian_packages("g++", "cmake"):
        fail(
            f"{ENGINE} has to be compiled and there is no C++ compiler; install one and start again (Debian and "
            "Ubuntu: sudo apt install g++ cmake; Fedora: sudo dnf install gcc-c++ cmake; macOS: xcode-select --install)"
        )
    from_source = ("--no-cache-dir", "--no-binary", ENGINE)
    if not build_environment(choice).get("CMAKE_ARGS"):
        # pip may hold a wheel it built or was pointed to before. It does not know for which CPU, so the wheel is asked.
        wheel = pip_wheel(building, choice, requirement)
        if runs_here(wheel):
            return wheel
        say(f"pip's {wheel.name} was built for another kind of CPU")
        wheel.unlink()
    return pip_wheel(building, choice, requirement, *from_source)


def pip_wheel(target: Path, choice: Choice, requirement: str, *options: str) -> Path:
    """Raises BuildError when pip makes no wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", str(target), *options]
    command.append(requirement)
    log = target.parent / f"build-{choice.backend.value}.log"
    environment = {**build_environment(choice), "TMPDIR": str(target)}  # pip's own leavings go when `target` goes
    progress = Progress()
    lines: queue.Queue[str | None] = queue.Queue()
    with log.open("w") as file, running(command, environment) as process:
        assert process.stdout is not None
        output = process.stdout

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        line: str | None = ""
        while line is not None:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                line = ""
            file.write(line or "")
            progress.see(line or "")
    progress.end()
    wheels = list(target.glob("llama_cpp_python-*.whl"))
    if process.returncode or not wheels:
        print("".join(f"  {line}\n" for line in log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
        raise BuildError(f"its output is in {log}")
    return wheels[0]


class Progress:
    """Says how far the build is: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.started = self.said = time.monotonic()
        self.step = f"fetching {ENGINE}"
        self.compiling = False

    def see(self, line: str) -> None:
        if counted := re.search(r"\[(\d+)/(\d+)\]", line):
            done, total = int(counted[1]), int(counted[2])
            self.step = f"compiling {ENGINE}: {done} of {total} ({100 * done // total} %)"
        elif percent := re.search(r"^\s*\[\s*(\d+)%\]", line):
            self.step = f"compiling {ENGINE}: {percent[1]} %"
        elif "Building wheel" in line and not self.compiling:
            self.compiling = True
            self.step = f"preparing to compile {ENGINE}"
            say(f"compiling {ENGINE} for this CPU: 6 to 9 minutes on two cores, once; its wheel is kept")
        terminal = sys.stdout.isatty()
        if time.monotonic() - self.said >= (1.0 if terminal else 15.0):
            self.said = time.monotonic()
            minutes, seconds = divmod(int(self.said - self.started), 60)
            message = f"setup: {self.step}, {minutes}:{seconds:02} so far"
            print(f"\r\x1b[K{message}" if terminal else message, end="" if terminal else "\n", flush=True)

    def end(self) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)


if __name__ == "__main__":
    main()
