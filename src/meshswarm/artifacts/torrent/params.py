"""How a torrent is handed to libtorrent: its info dict, where its file lies, what is there, and who may take part.

The rule this file keeps: every add says all of it again. libtorrent's own resume data would forget the swarm's
certificate, so it is not used.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import libtorrent as lt

from meshswarm.artifacts.torrent.certificates import TlsIdentity
from meshswarm.artifacts.torrent.content import Content, bencode
from meshswarm.errors import ArtifactError

_ALONE = lt.torrent_flags.disable_dht | lt.torrent_flags.disable_lsd | lt.torrent_flags.disable_pex
_UNUSED = lt.torrent_flags.auto_managed | lt.torrent_flags.paused | lt.torrent_flags.seed_mode
MAX_LAYER_BYTES = 32 << 20
"""Of a file with a million pieces: 4 TiB."""


def torrent_params(
    content: Content,
    path: Path,
    layer: bytes | None,
    have: Collection[int],
    tls: TlsIdentity | None,
    *,
    is_seed: bool = False,
) -> lt.add_torrent_params:
    """A torrent of which nothing is wanted yet. Blocking for large layers. Raises ArtifactError.

    `layer`: checked against the root; None leaves it to peers to prove each piece. With all pieces in `have` the file
    is served at once, each piece hashed before it is served first. `is_seed`: never write to the file, whatever is
    found wrong with it.
    """
    if content.layer_bytes > MAX_LAYER_BYTES:
        raise ArtifactError(f"a file of {content.length} bytes is too large to be shared as a torrent")
    torrent: dict[str, object] = {"info": content.info_dict()}
    if layer:
        torrent["piece layers"] = {content.root: layer}
    data = bencode(torrent)
    limits = {"max_buffer_size": MAX_LAYER_BYTES + (1 << 20), "max_pieces": 1 << 21}
    try:
        params: lt.add_torrent_params = cast(Any, lt.load_torrent_buffer)(data, limits)
    except RuntimeError as error:
        raise ArtifactError(f"libtorrent refuses the torrent: {error}") from error
    params.save_path = str(path.parent)
    params.renamed_files = {0: str(path)}
    params.storage_mode = lt.storage_mode_t.storage_mode_sparse
    params.flags = (params.flags & ~_UNUSED) | _ALONE
    if len(have) < content.n_pieces:
        params.piece_priorities = [0] * content.n_pieces
    if is_seed:
        params.flags |= lt.torrent_flags.upload_mode
    if len(have) == content.n_pieces:
        params.flags |= lt.torrent_flags.seed_mode
    else:
        params.have_pieces = [index in have for index in range(content.n_pieces)]
        params.flags |= lt.torrent_flags.no_verify_files
    if tls is not None:
        params.root_certificate = tls.root
    return params
