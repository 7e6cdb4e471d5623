"""In the `EXACT` profile no bit of any family depends on how many rows are computed together: what drafts rest on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from tests.stage.family_parity import prompt_of
from tests.stage.tiny_models import TINY, write_tiny
from tests.stage.unsplit import Unsplit

from meshswarm.stage.engine.profile import EXACT_ENCODINGS, EXACT_MAX_ROWS

N_HELD = 37
ROW_COUNTS = (2, 3, 8, 16, 33)


@pytest.mark.parametrize("name", TINY)
def test_rows_are_the_same_in_any_number(name: str, tmp_path: Path) -> None:
    prompt = prompt_of(N_HELD + EXACT_MAX_ROWS)
    for encoding in (Encoding.F32, Encoding.F16, Encoding.Q8_0, Encoding.Q4_0):
        assert encoding.name in EXACT_ENCODINGS
        unsplit = Unsplit(write_tiny(name, tmp_path / "model.gguf", encoding=encoding), n_ctx=128)
        unsplit.rows(prompt[:N_HELD], 0, [])
        held = unsplit.save()
        unsplit.restore(held)  # of windows a saved state keeps what later rows see, and so in other cells
        expected = unsplit.rows(prompt[N_HELD:], N_HELD, range(EXACT_MAX_ROWS))
        for n_rows in ROW_COUNTS:
            unsplit.restore(held)
            rows = unsplit.rows(prompt[N_HELD : N_HELD + n_rows], N_HELD, range(n_rows))
            assert np.array_equal(rows, expected[:n_rows]), f"{n_rows} rows in {encoding.name}"
        unsplit.close()
