"""What the clients of a Tinker server have: sessions, models, saved weights and samplers, by the owner of each.

Everything here follows from the journal: `ClientTables.fold` applies what a finished request did, when it finishes and
again at each start. What another owner has does not exist.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentrl.config.policies import LoraConfig
from agentrl.core.clock import Clock
from agentrl.core.errors import InputError, JournalError
from agentrl.core.files import remove_staging_directories, remove_whole
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.gateway.calls import RequestRefusedError
from agentrl.journal.requests import ClientRequest
from agentrl.observe.run_directory import RunDirectory
from agentrl.tinker import messages

if TYPE_CHECKING:
    from agentrl.journal.store import SqliteJournal
    from agentrl.tinker.trainer import ClientTrainer

WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS = "weights", "sampler_weights", "external_weights"
"""Kinds of saved weights, as they stand in `tinker://` paths: with optimizer state, to sample from, to download."""
CREATES = ("create_model", "load_weights")
"""Routes whose request with sequence number 0 creates a model."""
IMMEDIATE = (
    "create_session",
    "finish_session",
    "create_sampling_session",
    "delete_checkpoint",
    "set_checkpoint_ttl",
)
"""Routes whose requests are recorded with their results."""
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
RECORDED = (*IMMEDIATE, *CREATES, *SAVES)
"""Routes that change the tables."""


MAX_OF_OWNER = {"sessions": 1 << 16, "models": 1 << 13, "samplers": 1 << 16, "bytes of user_metadata": 1 << 24}
"""What one owner may have in a server, which keeps it in memory and never forgets it."""


@dataclass(slots=True, kw_only=True)
class BaseModel:
    """A served base model."""

    name: str
    policy: str
    """Policy of clients' models of it in the journal; its versions have a lineage per model."""
    own_policy: str
    """Policy of the base model itself."""
    trainer: ClientTrainer
    decode: Callable[[Sequence[int]], str]
    """Text of tokens, special ones included. A base model needs no chat template: clients send tokens."""
    stop_token_ids: tuple[int, ...]
    """The model's own stop tokens."""
    tokenizer: str
    max_rank: int
    """Maximum rank of an adapter; 0: clients train all weights."""

    @property
    def trains_all_weights(self) -> bool:
        """Whether clients train all weights, and no adapters."""
        return self.max_rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """Weights that a client saved under a name."""

    path: str
    """`tinker://MODEL/weights/NAME`, or `…/sampler_weights/NAME`."""
    sequence: int
    """Sequence number of the request, by which its directory is named."""
    at: float
    """Wall-clock time of the request."""
    expires: float | None
    weights: WeightsRef | None
    """Published version, if they are to sample from."""
    metadata: dict[str, str] | None

    @property
    def checkpoint_id(self) -> str:
        """The path without the model."""
        return self.path.removeprefix("tinker://").partition("/")[2]


class UnpublishedSteps(msgspec.Struct):
    """What a model trained on since its newest published version: the journal's record of the step between two."""

    rows: int = 0
    tokens: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the newest gradient."""
    seconds: float = 0.0
    digest: bytes = b""
    """Digest of the bodies of the passes, in order."""

    def add(self, body: bytes, rows: int, tokens: int, loss: float, seconds: float) -> None:
        """Add a pass."""
        self.rows += rows
        self.tokens += tokens
        self.loss += loss
        self.seconds += seconds
        self.digest = blake2b(self.digest + body, digest_size=16).digest()


@dataclass(slots=True, kw_only=True)
class ClientModel:
    """A client's model."""

    id: str
    owner: str
    base: BaseModel
    number: int
    """Number of the model in the server, from 1: the lineage of its versions."""
    lora: LoraConfig | None
    """Shape of its adapter; None: all weights."""
    seed: int | None
    metadata: dict[str, Any] | None
    next_sequence: int = 0
    """Sequence number of the next request to be executed; 0 creates the model."""
    waiting: dict[int, str] = field(default_factory=dict)
    """Ids of accepted requests that are not executed, by sequence number."""
    trained_tokens: float = 0.0
    """Tokens by which its turns are counted."""
    used_at: float = 0.0
    steps_since_checkpoint: int = 0
    has_gradient: bool = False
    unpublished: UnpublishedSteps = field(default_factory=lambda: UnpublishedSteps())
    saved: dict[str, SavedWeights] = field(default_factory=dict)
    """Saved weights, by `checkpoint_id`."""
    deleted: set[str] = field(default_factory=set)
    """Ids of saved weights that the client deleted."""
    newest: WeightsRef | None = None
    """Newest version that was published to sample from."""
    newest_step: int = -1
    """Number of changes of the weights at which it was published."""
    failure: str = ""
    """Why the model could not be created."""

    @property
    def is_ready(self) -> bool:
        """Whether its next request is there."""
        return self.next_sequence in self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A client's sampling session."""

    id: str
    owner: str
    base: BaseModel
    model: ClientModel | None
    weights: WeightsRef | None
    path: str | None
    follows: bool
    """Whether each request samples from the model's newest published weights."""


class ClientTables:
    """The tables of one server.

    Args:
        bases: base models, by the name that clients use.
        store: the journal.
        directory: the run directory.
        clock: times what expires.
        versions: number of unnamed versions of a model, or of a base with all weights, that are kept; 0: all.
        is_used: whether samples are drawn from a version now.
    """

    def __init__(
        self,
        bases: Mapping[str, BaseModel],
        store: SqliteJournal,
        directory: RunDirectory,
        clock: Clock,
        versions: int,
        is_used: Callable[[PolicyVersion], bool],
    ) -> None:
        self.bases = bases
        self._store = store
        self._directory = directory
        self._clock = clock
        self.versions = versions
        self._is_used = is_used
        self.sessions: dict[str, str] = {}
        """Owner of each session."""
        self.finished: set[str] = set()
        """Sessions that their clients have finished."""
        self.models: dict[str, ClientModel] = {}
        self.samplers: dict[str, Sampler] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        """How many of the kinds in `MAX_OF_OWNER` there are, by owner and kind."""

    # --- what requests did --------------------------------------------------------------------------------------------

    def fold(self, request: ClientRequest, result: Mapping[str, Any]) -> None:
        """Apply what a finished request did to the server's tables."""
        match request.route:
            case "create_session":
                self.sessions[result["session_id"]] = request.owner
                self._counts[request.owner, "sessions"] += 1
            case "finish_session":
                self.finished.add(request.subject)
            case "create_sampling_session":
                content = messages.read_json(json.loads(request.body), messages.CreateSampler)
                self._add_sampler(request.owner, result["sampling_session_id"], content)
                self._counts[request.owner, "samplers"] += 1
            case "save_weights":
                self._add_saved(request, messages.read_request(request.route, request.body), result, None)
            case "save_weights_for_sampler" | "save_weights_external":
                content = messages.read_request(request.route, request.body)
                self._add_published(request, content, result, self._published(result["agentrl_version"]))
            case "delete_checkpoint":
                model, checkpoint = self.models[request.subject], json.loads(request.body)["checkpoint"]
                self._forget_saved(model, checkpoint)
                model.deleted.add(checkpoint)
            case "set_checkpoint_ttl":
                change, saved = json.loads(request.body), self.models[request.subject].saved
                if (known := saved.get(change["checkpoint"])) is not None:
                    saved[change["checkpoint"]] = replace(known, expires=change["expires"])

    def _published(self, version: Sequence[Any]) -> WeightsRef:
        weights = self._store.published(PolicyVersion(*version))
        if weights is None:
            raise JournalError(f"the journal names version {version}, which was never published; it was altered")
        return weights

    def admit_model(self, request: ClientRequest) -> None:
        """Register a model whose first request was accepted; its number is its place among all of them."""
        if request.sequence != 0:
            return
        content = messages.read_request(request.route, request.body)
        if isinstance(content, messages.LoadWeights):
            source = self.saved_model(content.path)  # the weights themselves may be gone
            base, lora, seed = source.base, source.lora, source.seed
        else:
            base, shape = self.base_of(content.base_model), content.lora_config
            lora, seed = None, None
            if shape is not None and shape.rank:
                layers = base.trainer.layers(attention=shape.train_attn, mlp=shape.train_mlp)
                lora, seed = LoraConfig(rank=shape.rank, target_modules=layers), shape.seed
        self._counts[request.owner, "models"] += 1
        self._counts[request.owner, "bytes of user_metadata"] += metadata_bytes(content.user_metadata)
        self.models[request.subject] = ClientModel(
            id=request.subject,
            owner=request.owner,
            base=base,
            number=len(self.models) + 1,
            lora=lora,
            seed=seed,
            metadata=content.user_metadata,
        )

    def _add_saved(
        self, request: ClientRequest, content: Any, result: Mapping[str, Any], weights: WeightsRef | None
    ) -> None:
        """Register weights that were saved under a name."""
        model, at = self.models[request.subject], request.received_at
        saved = SavedWeights(
            path=result["path"],
            sequence=request.sequence,
            at=at,
            expires=None if content.ttl_seconds is None else at + content.ttl_seconds,
            weights=weights,
            metadata=content.user_metadata,
        )
        self._forget_saved(model, saved.checkpoint_id)
        self._counts[model.owner, "bytes of user_metadata"] += metadata_bytes(saved.metadata)
        model.saved[saved.checkpoint_id] = saved

    def _add_published(
        self,
        request: ClientRequest,
        content: messages.SaveForSampler | messages.SaveExternal,
        result: Mapping[str, Any],
        weights: WeightsRef,
    ) -> None:
        """Register a published version, under its name or as a sampling session."""
        model = self.models[request.subject]
        model.newest, model.newest_step = weights, result["agentrl_step"]
        if isinstance(content, messages.SaveExternal) or content.path is not None:
            self._add_saved(request, content, result, weights)
        else:
            sampler_id = result["sampling_session_id"]
            follows = content.kind == "inflight"
            self.samplers[sampler_id] = Sampler(
                id=sampler_id,
                owner=model.owner,
                base=model.base,
                model=model,
                weights=weights,
                path=None,
                follows=follows,
            )

    def _add_sampler(self, owner: str, sampler_id: str, content: messages.CreateSampler) -> None:
        if content.model_path is None:
            base, model, weights = self.base_of(content.base_model or ""), None, None
        else:
            saved = self.saved_of(owner, content.model_path, SAMPLER_WEIGHTS, expired=True)
            model = self.saved_model(saved.path)
            base, weights = model.base, saved.weights
        self.samplers[sampler_id] = Sampler(
            id=sampler_id, owner=owner, base=base, model=model, weights=weights, path=content.model_path, follows=False
        )

    # --- removing -----------------------------------------------------------------------------------------------------

    def remove_leftovers(self) -> None:
        """Remove what a killed process left: half of a version or of a state, and versions whose request has no result.
        It is executed again, and publishes them again."""
        checkpoints = self._directory.checkpoints
        for directory in (*(checkpoints / "models").glob("*"), *(checkpoints / "saved").glob("*")):
            remove_staging_directories(directory)
        for base in self.bases.values():
            remove_staging_directories(self._directory.versions / base.policy)
            for version, directory in self._versions_of(base):
                if self._store.published(version) is None:
                    remove_whole(directory)

    def remove_old_versions(self, model: ClientModel) -> None:
        """Remove versions that no name keeps, except the newest of a model. All weights are large, so models with them
        share the limit of their base; the versions of the model that was used last stay longest."""
        models = [model]
        if model.base.trains_all_weights:
            models = [other for other in self.models.values() if other.base is model.base]
        used_at = {other.number: other.used_at for other in models}
        named = {saved.weights.version for other in models for saved in other.saved.values() if saved.weights}
        versions = [
            each for each in self._versions_of(model.base) if each[0].lineage in used_at and each[0] not in named
        ]
        versions.sort(key=lambda each: (used_at[each[0].lineage], each[0]))
        for version, directory in versions[: -self.versions] if self.versions else ():
            if not self._is_used(version):
                remove_whole(directory)  # a later publication of the same weights looks for its name

    def _versions_of(self, base: BaseModel) -> Iterator[tuple[PolicyVersion, Path]]:
        """Yield the versions of clients' models of a base on disk."""
        for directory in (self._directory.versions / base.policy).glob("*.*"):
            lineage, _, step = directory.name.partition(".")
            if lineage.isdecimal() and step.isdecimal():
                yield PolicyVersion(base.policy, int(lineage), int(step)), directory

    def remove_expired(self, *models: ClientModel) -> None:
        """Remove saved weights of models whose time is over."""
        for model in models:
            if expired := [name for name, saved in model.saved.items() if self._is_expired(saved)]:
                for name in expired:
                    self._forget_saved(model, name)
                self.remove_old_versions(model)

    def _is_expired(self, saved: SavedWeights) -> bool:
        return saved.expires is not None and saved.expires < self._clock.wall()

    def _forget_saved(self, model: ClientModel, name: str) -> None:
        """Forget saved weights, if there are any, with the files that are no version."""
        saved = model.saved.pop(name, None)
        if saved is None:
            return
        self._counts[model.owner, "bytes of user_metadata"] -= metadata_bytes(saved.metadata)
        if saved.weights is None:
            shutil.rmtree(self.saved_directory(model, saved.sequence), ignore_errors=True)

    # --- bounds -------------------------------------------------------------------------------------------------------

    def check_room(self, owner: str, kind: str, more: int = 1) -> None:
        """Refuse what an owner would have too much of.

        Args:
            owner: the owner.
            kind: a key of `MAX_OF_OWNER`.
            more: how much a request would add.

        Raises:
            InputError: it is too much.
        """
        if self._counts[owner, kind] + more > MAX_OF_OWNER[kind]:
            raise InputError(
                f"a key may have {MAX_OF_OWNER[kind]} {kind} in a server, and this one has "
                f"{self._counts[owner, kind]}; use another key, or a server with another `name`, which begins empty"
            )

    # --- looking up ---------------------------------------------------------------------------------------------------

    def base_of(self, name: str) -> BaseModel:
        """Return a base model.

        Raises:
            InputError: it is not served.
        """
        base = self.bases.get(name)
        if base is None:
            raise InputError(f"the base model {name[:100]!r} is not served here; there are: {', '.join(self.bases)}")
        return base

    def session_of(self, owner: str, session_id: str) -> str:
        """Return the id of an owner's session.

        Raises:
            RequestRefusedError: there is none, or it has finished.
        """
        if self.sessions.get(session_id) != owner:
            raise RequestRefusedError(f"there is no session {session_id[:100]!r}", "model")
        if session_id in self.finished:
            raise RequestRefusedError(finished_line(session_id))
        return session_id

    def model_of(self, owner: str, model_id: str) -> ClientModel:
        """Return a model of an owner.

        Raises:
            RequestRefusedError: there is none.
        """
        return _owned(self.models.get(model_id), owner, f"model {model_id[:100]!r}")

    def models_of(self, owner: str) -> list[ClientModel]:
        """Return the models of an owner."""
        return [model for model in self.models.values() if model.owner == owner]

    def sampler_of(self, owner: str, sampler_id: str) -> Sampler:
        """Return a sampler of an owner.

        Raises:
            RequestRefusedError: there is none.
        """
        return _owned(self.samplers.get(sampler_id), owner, f"sampler {sampler_id[:100]!r}")

    def saved_model(self, path: str) -> ClientModel:
        """Return the model whose weights were saved, by their path."""
        return self.models[path.removeprefix("tinker://").partition("/")[0]]

    def saved_of(self, owner: str, path: str, kind: str, *, expired: bool = False) -> SavedWeights:
        """Return saved weights of an owner by their path; expired ones only on request.

        Raises:
            InputError: there are none.
        """
        model_id, _, checkpoint = path.removeprefix("tinker://").partition("/")
        model = self.models.get(model_id)
        if not path.startswith("tinker://") or model is None or model.owner != owner:
            raise InputError(f"there are no weights {path[:200]!r}")
        if not checkpoint.startswith(f"{kind}/"):
            raise InputError(f"{path[:200]}: weights for this request are tinker://MODEL/{kind}/NAME")
        if not expired:
            self.remove_expired(model)
        saved = model.saved.get(checkpoint)
        if saved is None:
            raise InputError(f"there are no weights {path[:200]!r}; they may have expired")
        return saved

    def check_unused(self, model: ClientModel, request: messages.SaveWeights | messages.SaveForSampler) -> None:
        """Refuse to replace saved weights or a sampler that the client did not ask to replace.

        Called again when the request is executed, in the trainer's thread: others may have come before it. So it
        removes nothing; a name whose time is over is replaced.
        """
        if isinstance(request, messages.SaveForSampler):
            if request.sampling_session_seq_id is not None and sampler_id_of(model, request) in self.samplers:
                raise InputError(f"sampling_session_seq_id {request.sampling_session_seq_id} was used by a sampler")
            return
        saved = model.saved.get(f"{WEIGHTS}/{request.path}")
        if saved is not None and not request.overwrite and not self._is_expired(saved):
            raise InputError(f"there are weights {request.path!r} already; choose another name, or overwrite")

    def saved_directory(self, model: ClientModel, sequence: int) -> Path:
        """Return the directory of weights with optimizer state, by the request that saved them."""
        return self._directory.checkpoints / "saved" / str(model.number) / str(sequence)


def finished_line(session_id: str) -> str:
    """Return why a finished session gets no more models and samplers."""
    return f"the session {session_id} has finished; create another"


def metadata_bytes(metadata: Mapping[str, Any] | None) -> int:
    """Return the size of a `user_metadata`, as JSON."""
    return 0 if metadata is None else len(json.dumps(metadata))


def sampler_id_of(model: ClientModel, request: messages.SaveForSampler) -> str:
    """Return the id of the sampler that a request makes."""
    number = sequence_number(request.sampling_session_seq_id, least=0)
    return f"{model.id.rpartition(':train:')[0]}:sample:{number}"


def sequence_number(number: int | None, *, least: int) -> int:
    """Return a client's sequence number.

    Raises:
        InputError: it is missing or out of range.
    """
    if number is None or not least <= number < 1 << 63:
        raise InputError(f"the sequence number {number} is missing or out of range; it is at least {least}")
    return number


OwnedT = TypeVar("OwnedT", ClientModel, Sampler)


def _owned(found: OwnedT | None, owner: str, name: str) -> OwnedT:
    """Return what was found for an owner. What others own is refused in the same words as what does not exist.

    Raises:
        RequestRefusedError: nothing was found, or it belongs to another owner.
    """
    if found is None or found.owner != owner:
        raise RequestRefusedError(f"there is no {name}", "model")
    return found
