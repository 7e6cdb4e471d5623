"""Models on the Hugging Face Hub, or on what HF_ENDPOINT names instead.

The rule this file keeps: where the hub is, who asks it and how it is asked are `huggingface_hub`'s to say, so HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE and a login count here as everywhere. The token goes to the hub alone; the bytes come by our
own client, from the commit that the reference meant when it was resolved.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, HfFileMetadata, constants, get_hf_file_metadata, get_token, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from meshswarm import __version__
from meshswarm.artifacts.sources.faults import DeniedError, MissingError, PassingError, SourceError
from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.hub_ref import HubRef
from meshswarm.artifacts.sources.located import Located
from meshswarm.artifacts.sources.pace import Retries
from meshswarm.artifacts.sources.part_file import Expected
from meshswarm.artifacts.sources.places import part_names
from meshswarm.artifacts.sources.url_rules import UrlRules, first_hop, shown
from meshswarm.errors import ConfigError

_MAX_LISTED = 12
T = TypeVar("T")


def resolve(ref: str) -> list[HttpSource]:
    """The files behind an `hf:` reference, in order, at the commit that it means now. Blocking.

    Raises ConfigError for one that cannot work, SourceError, saying what to do, when the hub does not give it.
    """
    return [located.source for located in locate_on_hub(HubRef.parse(ref), Path())]


def locate_on_hub(ref: HubRef, folder: Path, rules: UrlRules | None = None) -> tuple[Located, ...]:
    """As `resolve`, with what the hub says of each file and its place below `folder`."""
    rules = replace(rules or UrlRules(), allow_local=True)  # whose repository it is is a stranger's word, the hub ours
    first_hop(constants.ENDPOINT, rules)  # before a token goes there
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    secret = {} if token is None else {"authorization": f"Bearer {token}"}
    revision = ref.revision or constants.DEFAULT_REVISION
    found = []
    for file, target in zip(ref.files, ref.targets(folder), strict=True):
        metadata = _ask(ref, token is not None, partial(_metadata, ref, file, revision, token))
        if metadata.commit_hash is None or re.fullmatch(r"[0-9a-f]{40}", metadata.commit_hash) is None:
            raise SourceError(f"{shown(constants.ENDPOINT)} does not answer as a hub does: check HF_ENDPOINT")
        revision = metadata.commit_hash
        sha256 = metadata.etag if metadata.etag and re.fullmatch(r"[0-9a-f]{64}", metadata.etag) else None
        source = HttpSource(
            hf_hub_url(ref.repo_id, file, revision=revision), secret, rules=rules, version=metadata.etag
        )
        expected = Expected(length=metadata.size, sha256=None if sha256 is None else bytes.fromhex(sha256))
        found.append(Located(source, target, expected))
    return tuple(found)


def _metadata(ref: HubRef, file: str, revision: str, token: str | None) -> HfFileMetadata:
    url = hf_hub_url(ref.repo_id, file, revision=revision)
    return get_hf_file_metadata(
        url, token=token if token is not None else False, library_name="meshswarm", library_version=__version__
    )


def _ask(ref: HubRef, has_token: bool, question: Callable[[], T]) -> T:
    """What the hub answers, asked again while it is only busy."""
    retries, rng = Retries(), random.Random()
    while True:
        try:
            return question()
        except Exception as error:  # whatever its client, and the client's client, raise
            fault = _fault(ref, has_token, error)
        wait_s = retries.wait_s(fault.retry_after_s, rng) if isinstance(fault, PassingError) else None
        if wait_s is None:
            raise fault
        time.sleep(wait_s)


def _fault(ref: HubRef, has_token: bool, error: Exception) -> SourceError | ConfigError:
    """The same in our words, with what to do about it."""
    page = f"{shown(constants.ENDPOINT)}/{ref.repo_id}"
    log_in = "set HF_TOKEN, or log in with `hf auth login`"
    match error:
        case OfflineModeIsEnabled():
            return SourceError(
                f"{ref.repo_id} cannot be fetched: HF_HUB_OFFLINE is set; unset it, or give a file's path"
            )
        case GatedRepoError() if has_token:
            return DeniedError(
                f"{ref.repo_id} is gated, and your token's account may not read it: accept its terms at {page}, or use "
                "the token of an account that has"
            )
        case GatedRepoError():
            return DeniedError(f"{ref.repo_id} is gated: accept its terms at {page}, then {log_in}")
        case RepositoryNotFoundError():
            hint = "" if has_token else f"; if it is private, {log_in}"
            return MissingError(f"there is no repository {ref.repo_id} at {shown(constants.ENDPOINT)}{hint}")
        case RevisionNotFoundError():
            return MissingError(f"{ref.repo_id} has no revision {ref.revision}: leave it out for the newest")
        case EntryNotFoundError():
            return MissingError(_with_files(f"{ref.repo_id} has no file {ref.file}.", ref.repo_id, ref.revision))
        case HFValidationError():
            return ConfigError(f"{ref.repo_id} is not the name of a repository: {error}")
        case HfHubHTTPError():
            return _http_fault(ref, error.response.status_code, log_in)
    return PassingError(
        f"{shown(constants.ENDPOINT)} cannot be reached ({type(error).__name__}): is this machine online? A file "
        "that is already here can be given by its path"
    )


def _http_fault(ref: HubRef, status: int, log_in: str) -> SourceError:
    if status == 401:
        return DeniedError(f"{ref.repo_id} wants to know who asks, or your token is not valid (HTTP 401): {log_in}")
    if status == 403:
        return DeniedError(f"{ref.repo_id} may not be read with your token (HTTP 403)")
    if status in (429, 500, 502, 503, 504):
        return PassingError(f"{shown(constants.ENDPOINT)} is too busy (HTTP {status}): try again later")
    return SourceError(f"{shown(constants.ENDPOINT)} answers with HTTP {status} for {ref.repo_id}")


def which_file(repo_id: str) -> str:
    """What to tell somebody who named no file. Blocking."""
    return _with_files(f"hf:{repo_id} names no file: write hf:{repo_id}/FILE.gguf.", repo_id, None)


def _with_files(sentence: str, repo_id: str, revision: str | None) -> str:
    """The sentence, and which models the repository has, if it tells."""
    try:
        names = [name for name in HfApi().list_repo_files(repo_id, revision=revision) if name.endswith(".gguf")]
    except Exception:  # it was only to help
        return sentence
    shortened = [name for name in names if part_names(name)[0] == name]
    more = f" and {len(shortened) - _MAX_LISTED} more" if len(shortened) > _MAX_LISTED else ""
    return (
        f"{sentence} It has: {', '.join(shortened[:_MAX_LISTED])}{more}" if shortened else f"{sentence} It has no GGUF"
    )
