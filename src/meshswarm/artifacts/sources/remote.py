"""Fetching what a reference to a server or a hub means: all files of a model, each checked.

The rule this file keeps: a model is there when all its files are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshswarm.artifacts.merkle import Progress, file_root, model_id
from meshswarm.artifacts.sources.download import download
from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.hub_ref import bare_repo, hub_ref
from meshswarm.artifacts.sources.located import Located
from meshswarm.artifacts.sources.pace import DownloadProgress
from meshswarm.artifacts.sources.part_file import Expected, PartFile
from meshswarm.artifacts.sources.places import part_names, place, safe_name
from meshswarm.artifacts.sources.pypi import Say
from meshswarm.artifacts.sources.transfer import OnProgress, in_thread
from meshswarm.artifacts.sources.url_rules import UrlRules, file_name, first_hop, with_file_name
from meshswarm.errors import ArtifactError, ConfigError


def locate(ref: str, folder: Path, rules: UrlRules | None = None) -> tuple[Located, ...]:
    """The remote files behind an `https:` or `hf:` reference, in order, several of a split model. Blocking: the hub is
    asked for what it knows of them.

    Raises ConfigError for a reference that cannot work, SourceError when the hub does not know it or not us.
    """
    if (repo := bare_repo(ref)) is not None:
        from meshswarm.artifacts.sources.hf import which_file  # the hub's client takes a second to import

        raise ConfigError(which_file(repo))
    if (hub := hub_ref(ref)) is not None:
        from meshswarm.artifacts.sources.hf import locate_on_hub

        return locate_on_hub(hub, folder, rules)
    return tuple(
        Located(HttpSource(url, rules=rules), target, Expected())
        for url, target in zip(_part_urls(ref), _web_targets(ref, folder), strict=True)
    )


def _part_urls(ref: str) -> tuple[str, ...]:
    """The URLs of all parts of the model that `ref` is a file of."""
    name = file_name(ref)
    names = part_names(name)
    return (ref,) if names == (name,) else tuple(with_file_name(ref, part) for part in names)


def _web_targets(ref: str, folder: Path) -> tuple[Path, ...]:
    urls = _part_urls(ref)
    where = place(folder, "web", first_hop(urls[0], UrlRules(allow_http=True)).host, urls[0])
    return tuple(where / safe_name(file_name(url)) for url in urls)


async def fetch_remote(
    ref: str,
    folder: Path,
    say: Say,
    listeners: Listeners,
    expected_id: bytes | None = None,
    rules: UrlRules | None = None,
) -> Path:
    """See `references.fetch_whole`."""
    targets = targets_of(ref, folder)
    if await in_thread(_are_here, targets, expected_id):
        return targets[0]
    located = await in_thread(locate, ref, folder, rules)
    await _download_all(located, say, listeners, expected_id)
    return located[0].target


def targets_of(ref: str, folder: Path) -> tuple[Path, ...]:
    """Where the files of `ref` lie once they are fetched; none where it names none."""
    if bare_repo(ref) is not None:
        return ()
    hub = hub_ref(ref)
    return _web_targets(ref, folder) if hub is None else hub.targets(folder)


def _are_here(targets: Sequence[Path], expected_id: bytes | None) -> bool:
    if not targets or not all(PartFile(target).is_complete for target in targets):
        return False
    return expected_id is None or model_id([(path.stat().st_size, file_root(path)) for path in targets]) == expected_id


async def _download_all(located: Sequence[Located], say: Say, listeners: Listeners, expected_id: bytes | None) -> None:
    files = []
    for each in located:
        expected = each.expected
        if len(located) == 1 and expected_id is not None:
            expected = replace(expected, model_id=expected_id)
        async with each.source as source:
            size = "" if expected.length is None else f" ({expected.length / 1e6:,.0f} MB)"
            say(f"Downloading {each.target.name}{size} from {first_hop(source.url, source.rules).host}")
            hashed = await download(source, each.target, expected=expected, progress=listeners.hear, say=say)
        root = hashed.content.root if hashed is not None else await in_thread(file_root, each.target)
        files.append((each.target.stat().st_size, root))
        listeners.next_file(files[-1][0])
    if expected_id is not None and model_id(files) != expected_id:
        for each in located:
            each.target.unlink(missing_ok=True)
        raise ArtifactError(f"{located[0].target.name} is not the model it should be: its content id differs")


class Listeners:
    """Tells of all files of a model as if they were one, as far as their sizes are known."""

    def __init__(self, progress: Progress | None, rate: OnProgress | None) -> None:
        self._progress = progress
        self._rate = rate
        self._before = 0

    def next_file(self, length: int) -> None:
        self._before += length

    def hear(self, now: DownloadProgress) -> None:
        whole = replace(now, done_bytes=self._before + now.done_bytes, total_bytes=self._before + now.total_bytes)
        if self._progress is not None:
            self._progress(whole.done_bytes, whole.total_bytes)
        if self._rate is not None:
            self._rate(whole)
