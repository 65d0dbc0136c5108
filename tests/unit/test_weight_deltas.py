"""Versions of full weights that are stored as changes: what is read is what was published, or it is refused."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.app.policies import weights_from_directory
from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import ModelConfig
from agentrl.core import weight_deltas
from agentrl.core.errors import EngineError, InputError, ModelError, StorageError, TrainerError
from agentrl.core.files import DELTA_FILES, WEIGHT_FILES, LocalDisk, check_model_directory
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.weight_deltas import (
    DeltaEncoder,
    DeltaRecord,
    WeightDeltaError,
    digest_of_version,
    make_whole,
    open_weights,
    read_record,
    write_record,
)
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights.reading import copy_weight_files, read_metadata, read_weights
from agentrl.learn.trainer import PolicyTrainer
from agentrl.observe.run_directory import RunDirectory
from agentrl.orchestrator.checkpoints import VersionRetention
from tests.learn_cases import LORA, Episodes, make_rows, run_config, write_model, write_tokenizer
from tests.support.sim_disk import SimDisk

(WHOLE,) = WEIGHT_FILES["full"]
RECORD, DELTA = DELTA_FILES
HEADER = (8).to_bytes(8, "little") + b"{}      "
EPISODES = Episodes(make_rows(0, 8))
WORDS = st.binary(max_size=4000).map(lambda data: data[: len(data) // 2 * 2])


def store(directory: Path, data: bytes, base: Path, base_data: bytes) -> str:
    """Store bytes after `HEADER` as changes of a base, in pieces as tensors come; return their digest."""
    directory.mkdir()
    encoder = DeltaEncoder(io.BytesIO(base_data))
    with (directory / DELTA).open("wb") as file:
        for part in (HEADER, data[:7], data[7:1000], data[1000:]):
            file.writelines(encoder.add(memoryview(part)))
        file.writelines(encoder.finish())
    digest = hashlib.sha256(HEADER + data).hexdigest()
    write_record(directory, DeltaRecord(base.name, "0" * 64, digest))
    return digest


def content(directory: Path) -> bytes:
    with open_weights(directory / WHOLE) as file:
        return file.read()


@pytest.mark.property
@given(
    base=WORDS,
    versions=st.lists(st.dictionaries(st.integers(0, 2000), st.integers(-(2**15), 2**15 - 1), max_size=8), max_size=4),
    block_bytes=st.sampled_from([2, 64, 1 << 22]),
    length=st.one_of(st.none(), st.integers(0, 7000)),
)
def test_what_is_read_is_what_was_encoded(
    tmp_path_factory: pytest.TempPathFactory,
    base: bytes,
    versions: list[dict[int, int]],
    block_bytes: int,
    length: int | None,
) -> None:
    """Also through several deltas, in blocks of any size, and with a last version of another length."""
    directory = tmp_path_factory.mktemp("versions")
    words = np.frombuffer(base, "<u2").copy()
    (directory / "0.0").mkdir()
    (directory / "0.0" / WHOLE).write_bytes(HEADER + words.tobytes())
    data = [words.tobytes()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_deltas, "BLOCK_BYTES", block_bytes)
        for number, changes in enumerate(versions, start=1):
            for position, difference in changes.items():
                if position < len(words):
                    words[position] = (int(words[position]) + difference) % 2**16
            data.append(words.tobytes())
            if number == len(versions) and length is not None:
                data[-1] = (data[-1] + bytes(7000))[:length]
            store(directory / f"0.{number}", data[-1], directory / f"0.{number - 1}", data[-2])
        for number, expected in enumerate(data):
            assert content(directory / f"0.{number}") == HEADER + expected


def test_few_changes_are_few_bytes() -> None:
    """One change in a hundred words takes about nine bits: its distance and its sign."""
    draw = np.random.default_rng(0)
    old = draw.integers(0, 2**16, 1 << 20).astype("<u2")
    new = old.copy()
    changed = draw.random(len(old)) < 0.01
    new[changed] += draw.choice(np.array([1, 2**16 - 1], "<u2"), int(changed.sum()))
    encoder = DeltaEncoder(io.BytesIO(old.tobytes()))
    list(encoder.add(memoryview(HEADER)))
    size = sum(map(len, [*encoder.add(memoryview(new.tobytes())), *encoder.finish()]))
    assert (encoder.num_changed, encoder.num_words) == (changed.sum(), len(old))
    assert size < 10 / 8 * encoder.num_changed


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A version `0.1`, whole, and a version `0.2`, stored as its changes."""
    old = np.arange(5000, dtype="<u2")
    (tmp_path / "0.1").mkdir()
    (tmp_path / "0.1" / WHOLE).write_bytes(HEADER + old.tobytes())
    new = old.copy()
    new[::50] += 1
    digest = store(tmp_path / "0.2", new.tobytes(), tmp_path / "0.1", old.tobytes())
    (tmp_path / "digest").write_text(digest)
    return tmp_path


def reference(directory: Path) -> WeightsRef:
    digest = (directory / "digest").read_text()
    return WeightsRef(version=PolicyVersion("policy", 0, 2), path=str(directory / "0.2"), kind="full", sha256=digest)


def flip(path: Path, at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 0x10
    path.write_bytes(damaged)


def another_base(directory: Path) -> None:
    shutil.copytree(directory / "0.1", directory / "0.3")
    flip(directory / "0.3" / WHOLE, -1)
    write_record(directory / "0.2", DeltaRecord("0.3", "0" * 64, reference(directory).sha256))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("moved")))


def loop(directory: Path) -> None:
    write_record(directory / "0.2", DeltaRecord("0.2", "0" * 64, "0" * 64))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (another_base, "the SHA-256 digest of .*0.2/model.safetensors is"),
        (loop, "more than 8 deltas lead to it"),
        (lambda directory: (directory / "0.1" / WHOLE).unlink(), "0.1/model.safetensors cannot be read"),
        (lambda directory: (directory / "0.2" / DELTA).unlink(), "0.2/delta.bin cannot be read"),
        (lambda directory: (directory / "0.2" / DELTA).write_bytes(b""), "delta.bin is empty"),
        (lambda directory: flip(directory / "0.2" / DELTA, -1), "0.2/delta.bin is damaged"),
        (lambda directory: flip(directory / "0.2" / DELTA, 12), "0.2/delta.bin is damaged"),
        (lambda directory: (directory / "0.2" / DELTA).write_bytes(bytes(4)), "0.2/delta.bin ends within"),
        (lambda directory: (directory / "0.2" / RECORD).write_bytes(b"{}"), "0.2/delta.json is damaged"),
        (
            lambda directory: (directory / "0.2" / RECORD).write_text(
                '{"base": "../1", "base_sha256": "", "sha256": ""}'
            ),
            "0.2/delta.json is damaged .*is not a directory of a version",
        ),
        (
            lambda directory: (directory / "0.1" / WHOLE).write_bytes(b"\xff" * 9),
            "0.1/model.safetensors has no .*header",
        ),
        (lambda directory: os.truncate(directory / "0.1" / WHOLE, 10_015), "0.2/delta.bin .*do not fit the base"),
        (lambda directory: pipe(directory / "0.2" / DELTA), "0.2/delta.bin cannot be read .not a regular file"),
        (lambda directory: pipe(directory / "0.1" / WHOLE), "0.1/model.safetensors cannot be read .not a regular file"),
        (lambda directory: link(directory / "0.1" / WHOLE), "0.1/model.safetensors cannot be read .Too many"),
        (lambda directory: link(directory / "0.1"), "0.1 is a symbolic link"),
    ],
)
def test_a_damaged_version_is_refused_by_name(stored: Path, damage: object, reason: str) -> None:
    assert callable(damage)
    damage(stored)
    with pytest.raises(EngineError, match=f"policy@0.2 refused: .*{reason}"):
        read_weights(reference(stored), max_numbers=1 << 24)
    with pytest.raises((OSError, WeightDeltaError)):
        digest_of_version(stored / "0.2", "full")
    if reason.startswith("the SHA"):
        with pytest.raises(InputError, match=r"0\.2: the SHA-256 digest .*give another version"):
            weights_from_directory("other", stored / "0.2")
        with pytest.raises(WeightDeltaError, match=r"0\.2: the SHA-256 digest"):
            make_whole(stored / "0.2")
    assert sorted(path.name for path in (stored / "0.2").iterdir() if path.name == WHOLE) == []


def test_changes_that_expand_without_end_are_refused(stored: Path) -> None:
    payload = weight_deltas.zlib.compress(bytes(1 << 26))
    with (stored / "0.2" / DELTA).open("ab") as file:
        file.write(weight_deltas._FRAME.pack(10, len(payload)) + payload)
    with pytest.raises(WeightDeltaError, match="a frame does not end"):
        content(stored / "0.2")


def test_versions_that_a_delta_needs_stay_while_it_does(tmp_path: Path) -> None:
    """The first version is whole, later ones are deltas, and the fifth is whole again."""
    directory = tmp_path / "policy"
    directory.mkdir()

    def publish(step: int) -> WeightsRef:
        if step in (0, 5):
            (directory / f"0.{step}").mkdir()
            (directory / f"0.{step}" / WHOLE).write_bytes(HEADER + bytes(10))
        else:
            store(directory / f"0.{step}", bytes(10), directory / f"0.{step - 1}", bytes(10))
        return WeightsRef(
            version=PolicyVersion("policy", 0, step), path=str(directory / f"0.{step}"), kind="full", sha256=""
        )

    async def main() -> None:
        retention = VersionRetention(keep=2)
        for step in range(9):
            await retention.prune(publish(step))
            for version in range(max(0, step - 1), step + 1):
                assert content(directory / f"0.{version}") == HEADER + bytes(10)
        assert sorted(path.name for path in directory.iterdir()) == ["0.5", "0.6", "0.7", "0.8"]

    asyncio.run(main())


def test_a_version_is_durable_with_those_that_its_delta_needs() -> None:
    disk, directory = SimDisk(), Path("/run/versions/policy")
    for folder in (*reversed(directory.parents[:2]), directory):
        disk.make_directory(folder)
    disk.sync(Path("/"))
    for step in range(4):
        version = directory / f"0.{step}"
        disk.make_directory(version)
        if step:
            record = DeltaRecord(f"0.{step - 1}", "0" * 64, "1" * 64)
            disk.write(version / RECORD, msgspec.json.encode(record))
        disk.write(version / (DELTA if step else WHOLE), b"numbers")
    needed = WeightsRef(
        version=PolicyVersion("policy", 0, 2), path=str(directory / "0.2"), kind="full", sha256="1" * 64
    )
    retention = VersionRetention(keep=1, disk=disk)
    asyncio.run(retention.make_durable([needed, replace(needed, path=str(directory / "0.7"))]))
    survivor = disk.after_crash("lost")
    assert survivor.files(directory).keys() == {f"0.0/{WHOLE}"} | {
        f"0.{step}/{name}" for step in (1, 2) for name in (DELTA, RECORD)
    }
    assert survivor.read(directory / "0.2" / DELTA, limit=99) == b"numbers"
    operations = disk.operations
    asyncio.run(retention.make_durable([needed]))
    assert disk.operations == operations, "each version is synced once"


def test_nothing_is_deleted_while_a_record_cannot_be_read(tmp_path: Path) -> None:
    class FailingDisk(LocalDisk):
        fails = True

        def read(self, path: Path, *, limit: int) -> bytes:
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return super().read(path, limit=limit)

    for step in range(3):
        (tmp_path / f"0.{step}").mkdir()
        (tmp_path / f"0.{step}" / WHOLE).write_bytes(HEADER + bytes(10))
    store(tmp_path / "0.3", bytes(10), tmp_path / "0.2", bytes(10))
    newest = WeightsRef(version=PolicyVersion("policy", 0, 3), path=str(tmp_path / "0.3"), kind="full", sha256="")
    disk = FailingDisk()
    retention = VersionRetention(keep=1, disk=disk)
    asyncio.run(retention.prune(newest))
    assert len(list(tmp_path.iterdir())) == 4
    disk.fails = False
    asyncio.run(retention.prune(newest))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.2", "0.3"]
    (tmp_path / "0.3" / RECORD).write_text("damaged")
    asyncio.run(retention.prune(newest))
    assert [path.name for path in tmp_path.iterdir()] == ["0.3"]


# --- a trainer --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    path = write_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    return path


def config_of(model: Path, publish: str = "delta", **policy: object) -> RunConfig:
    config = run_config(model, policies={"policy": PolicyConfig(**{"learning_rate": 1e-4, **policy})})  # type: ignore[arg-type]
    # an engine in this process would take the newest weights from the trainer
    engine = config.engine.model_copy(update={"publish": publish, "replicas": 1})
    return config.model_copy(update={"model": ModelConfig(path=str(model), dtype="bfloat16"), "engine": engine})


def train(directory: Path, config: RunConfig) -> PolicyTrainer:
    trainer = PolicyTrainer(config.trainer_plan, directory, read=EPISODES.read)
    trainer.start()
    return trainer


def publish(trainer: PolicyTrainer, step: int) -> WeightsRef:
    if step:
        trainer.forward_backward(EPISODES.batch(step))
        trainer.optim_step("policy", step)
    return trainer.publish("policy", PolicyVersion("policy", 0, step))


def names(weights: WeightsRef) -> set[str]:
    return {path.name for path in Path(weights.path).iterdir()} & {WHOLE, DELTA, RECORD}


def test_an_engine_has_the_trainer_s_weights_also_after_a_restart(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.learn.publish.MAX_DELTAS", 3)

    def load() -> EmbeddedEngine:
        start = {"policy": PolicyVersion("policy", 0, 0)}
        return EmbeddedEngine.load(str(model), versions=start, slots=2, max_context=64, dtype="bfloat16", device="cpu")

    async def main() -> None:
        trainer = train(tmp_path, config_of(model))
        policy, engine = trainer._learners["policy"].model, load()

        def check() -> None:
            served = engine.versions.of_policy("policy").model_copy.model.state_dict()
            for name, tensor in policy.model.state_dict().items():
                assert torch.equal(served[name].view(torch.int16), tensor.view(torch.int16)), name

        stored = []
        for step in range(6):
            weights = publish(trainer, step)
            stored.append(names(weights))
            await engine.serve([weights], ())
            check()
            assert (weights.changed_numbers is None) == (step == 0)
        changes = {DELTA, RECORD}
        assert stored == [{WHOLE}, changes, changes, {WHOLE, *changes}, changes, changes]
        await engine.close()
        engine = load()
        await engine.serve([weights], ())
        check()
        await engine.close()

    asyncio.run(main())


def test_whoever_reads_a_version_gets_it_whole(tmp_path: Path, model: Path) -> None:
    trainer = train(tmp_path / "run", config_of(model))
    publish(trainer, 0)
    weights = publish(trainer, 1)
    assert names(weights) == {DELTA, RECORD}
    expected = read_weights(weights, max_numbers=1 << 24)
    copied = copy_weight_files(weights, tmp_path / "copy", max_numbers=1 << 24)
    assert read_metadata(weights) == expected.metadata
    assert load_file(Path(copied.path) / WHOLE).keys() == expected.tensors.keys()
    assert weights_from_directory("other", weights.path).sha256 == weights.sha256
    with pytest.raises(ModelError, match="stored as changes since another one"):
        check_model_directory(weights.path)
    links = RunDirectory(tmp_path / "run").link("policies", {"policy": weights})
    assert names(weights) == {WHOLE, DELTA, RECORD}
    loaded = AutoModelForCausalLM.from_pretrained(links["policy"], dtype="auto")
    assert torch.equal(loaded.state_dict()["model.norm.weight"], expected.tensors["model.norm.weight"])


def test_a_run_from_a_copy_of_a_version_has_its_own_versions(tmp_path: Path, model: Path) -> None:
    """The copy of `policies/NAME` has a delta too, next to the whole file."""
    first = train(tmp_path / "first", config_of(model))
    publish(first, 0)
    links = RunDirectory(tmp_path / "first").link("policies", {"policy": publish(first, 1)})
    second = train(tmp_path / "second", config_of(Path(shutil.copytree(links["policy"], tmp_path / "copy"))))
    assert (tmp_path / "copy" / DELTA).is_file()
    assert names(publish(second, 0)) == {WHOLE}
    weights = publish(second, 1)
    assert names(weights) == {DELTA, RECORD}
    assert weights_from_directory("policy", weights.path).sha256 == weights.sha256


def test_a_version_is_never_published_again_with_other_weights(tmp_path: Path, model: Path) -> None:
    """A restarted trainer stores it whole where it was a delta, and finds it equal."""
    first = train(tmp_path, config_of(model))
    publish(first, 0)
    weights = publish(first, 1)
    again = train(tmp_path, config_of(model))
    publish(again, 0)
    assert publish(again, 1) == weights
    assert publish(again, 2).sha256 == publish(first, 2).sha256
    other = train(tmp_path, config_of(model, learning_rate=1e-2))
    publish(other, 0)
    with pytest.raises(TrainerError, match=r"exists in .* with different weights"):
        publish(other, 1)


def test_a_delta_is_made_where_it_is_smaller(tmp_path: Path, model: Path) -> None:
    """Not of large steps, of 32 bits, of small files unless that is set, of adapters, or where it is turned off."""

    def stored(name: str, config: RunConfig) -> set[str]:
        trainer = train(tmp_path / name, config)
        publish(trainer, 0)
        return names(publish(trainer, 1))

    assert stored("delta", config_of(model)) == {DELTA, RECORD}
    assert stored("full", config_of(model, "full")) == {WHOLE}
    assert stored("auto", config_of(model, "auto")) == {WHOLE}
    assert stored("large", config_of(model, learning_rate=1e-1)) == {WHOLE}
    single = config_of(model).model_copy(update={"model": ModelConfig(path=str(model), dtype="float32")})
    assert stored("float32", single) == {WHOLE}
    assert stored("adapter", config_of(model, lora=LORA)) == set()


def test_without_its_base_a_version_is_whole(tmp_path: Path, model: Path) -> None:
    trainer = train(tmp_path, config_of(model))
    base = Path(publish(trainer, 0).path)
    publish(trainer, 1)
    shutil.rmtree(base)
    assert names(publish(trainer, 2)) == {WHOLE}


def test_a_damaged_base_stops_the_run_by_name(tmp_path: Path, model: Path) -> None:
    trainer = train(tmp_path, config_of(model))
    directory = RunDirectory(tmp_path)
    directory.link("policies", {"policy": publish(trainer, 0)})
    weights = publish(trainer, 1)
    flip(Path(weights.path) / DELTA, -1)
    with pytest.raises(StorageError, match=r"0\.1/delta\.bin is damaged .*--resume"):
        directory.link("policies", {"policy": weights})
    assert directory.linked("policies")["policy"].resolve().name == "0.0"
    with pytest.raises(StorageError, match=r"0\.1/delta\.bin is damaged .*start the run again with --resume"):
        publish(trainer, 2)
    (Path(weights.path) / RECORD).write_text("{}")
    with pytest.raises(StorageError, match=r"0\.1/delta\.json is damaged .*start the run again with --resume"):
        trainer.publish("policy", PolicyVersion("policy", 0, 2))


def test_the_record_names_the_base(stored: Path) -> None:
    record = read_record(stored / "0.2")
    assert record is not None
    assert record.base == "0.1"
    assert replace(reference(stored), changed_numbers=0.5) == reference(stored)
