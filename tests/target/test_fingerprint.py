from __future__ import annotations

import shutil
from pathlib import Path

from flowdflash.target.fingerprint import differences, fingerprint, fingerprint_id

from .models import llama_folder


def test_a_copy_has_the_same_fingerprint_and_a_fine_tuned_model_another(tmp_path: Path) -> None:
    one = llama_folder(tmp_path / "one")
    shutil.copytree(one, tmp_path / "copy")
    tuned = llama_folder(tmp_path / "tuned", seed=1)
    facts = [fingerprint(folder, "m", (0, 2), 32, "float32") for folder in (one, tmp_path / "copy", tuned)]
    assert facts[0] == facts[1]
    assert [line.split(":")[0] for line in differences(facts[0], facts[2])] == ["weights"]
    assert fingerprint_id(facts[0]) == fingerprint_id(facts[1]) != fingerprint_id(facts[2])


def test_layers_and_dtype_are_part_of_it(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "one")
    base = fingerprint(folder, "m", (0, 2), 32, "float32")
    assert base["layer_id_convention"] == "layer_output"
    assert differences(base, fingerprint(folder, "m", (0, 1), 32, "bfloat16")) == [
        "dtype: kept float32, this run bfloat16",
        "layers: kept [0, 2], this run [0, 1]",
    ]
