"""What the clients of a Tinker server have: sessions, models, saved weights and samplers.

Everything here follows from the journal: `ClientTables.fold` applies what a finished request did, when it finishes and
again at each start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.parts import ClientRequest, InputError, LoraConfig, Parts, PolicyVersion, TrainedSince, WeightsRef
from agentrl_tinker import messages
from agentrl_tinker.errors import RequestRefusedError

if TYPE_CHECKING:
    from agentrl.parts import ClientLearner

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


@dataclass(slots=True, kw_only=True)
class BaseModel:
    """A served base model."""

    name: str
    policy: str
    """Policy of clients' models of it in the journal; its versions have a lineage per model."""
    own_policy: str
    """Policy of the base model itself."""
    learner: ClientLearner
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


@dataclass(slots=True, kw_only=True)
class ClientModel:
    """A client's model."""

    id: str
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
    used_at: float = 0.0
    steps_since_checkpoint: int = 0
    has_gradient: bool = False
    unpublished: TrainedSince = field(default_factory=TrainedSince)
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
    base: BaseModel
    model: ClientModel | None
    weights: WeightsRef | None
    path: str | None
    follows: bool
    """Whether each request samples from the model's newest published weights."""


class ClientTables:
    """The tables of one server.

    Args:
        parts: parts of the run.
        bases: base models, by the name that clients use.
        versions: number of unnamed versions of a model, or of a base with all weights, that are kept; 0: all.
    """

    def __init__(self, parts: Parts, bases: Mapping[str, BaseModel], versions: int) -> None:
        self._parts = parts
        self.bases = bases
        self.versions = versions
        self.sessions: dict[str, None] = {}
        """In the order in which they began."""
        self.finished: set[str] = set()
        """Sessions that their clients have finished."""
        self.models: dict[str, ClientModel] = {}
        self.samplers: dict[str, Sampler] = {}

    # --- what requests did --------------------------------------------------------------------------------------------

    def fold(self, request: ClientRequest, result: Mapping[str, Any]) -> None:
        """Apply what a finished request did to the server's tables."""
        match request.route:
            case "create_session":
                self.sessions[result["session_id"]] = None
            case "finish_session":
                self.finished.add(request.subject)
            case "create_sampling_session":
                content = messages.read_json(json.loads(request.body), messages.CreateSampler)
                self._add_sampler(result["sampling_session_id"], content)
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
        weights = self._parts.published(PolicyVersion(*version))
        if weights is None:
            raise InputError(f"the journal names version {version}, which was never published; it was altered")
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
                layers = base.learner.layers(attention=shape.train_attn, mlp=shape.train_mlp)
                lora, seed = LoraConfig(rank=shape.rank, target_modules=layers), shape.seed
        self.models[request.subject] = ClientModel(
            id=request.subject,
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
                base=model.base,
                model=model,
                weights=weights,
                path=None,
                follows=follows,
            )

    def _add_sampler(self, sampler_id: str, content: messages.CreateSampler) -> None:
        if content.model_path is None:
            base, model, weights = self.base_of(content.base_model or ""), None, None
        else:
            saved = self.saved_of(content.model_path, SAMPLER_WEIGHTS, expired=True)
            model = self.saved_model(saved.path)
            base, weights = model.base, saved.weights
        self.samplers[sampler_id] = Sampler(
            id=sampler_id, base=base, model=model, weights=weights, path=content.model_path, follows=False
        )

    # --- removing -----------------------------------------------------------------------------------------------------

    def remove_old_versions(self, model: ClientModel) -> None:
        """Remove versions that no name keeps, except the newest of a model. All weights are large, so models with them
        share the limit of their base; the versions of the model that was used last stay longest."""
        models = [model]
        if model.base.trains_all_weights:
            models = [other for other in self.models.values() if other.base is model.base]
        used_at = {other.number: other.used_at for other in models}
        named = {saved.weights.version for other in models for saved in other.saved.values() if saved.weights}
        on_disk = self._parts.version_directories(model.base.policy)
        versions = [each for each in on_disk if each[0].lineage in used_at and each[0] not in named]
        versions.sort(key=lambda each: (used_at[each[0].lineage], each[0]))
        for version, directory in versions[: -self.versions] if self.versions else ():
            if not self._parts.sampler.is_used(version):
                self._parts.remove(directory)  # a later publication of the same weights looks for its name

    def remove_expired(self, *models: ClientModel) -> None:
        """Remove saved weights of models whose time is over."""
        for model in models:
            if expired := [name for name, saved in model.saved.items() if self._is_expired(saved)]:
                for name in expired:
                    self._forget_saved(model, name)
                self.remove_old_versions(model)

    def _is_expired(self, saved: SavedWeights) -> bool:
        return saved.expires is not None and saved.expires < self._parts.clock.wall()

    def _forget_saved(self, model: ClientModel, name: str) -> None:
        """Forget saved weights, if there are any, with the files that are no version."""
        saved = model.saved.pop(name, None)
        if saved is None:
            return
        if saved.weights is None:
            self._parts.remove(self.saved_directory(model, saved.sequence))

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

    def session_of(self, session_id: str) -> str:
        """Return the id of an open session.

        Raises:
            RequestRefusedError: there is none, or it has finished.
        """
        if session_id not in self.sessions:
            raise RequestRefusedError(f"there is no session {session_id[:100]!r}", 404)
        if session_id in self.finished:
            raise RequestRefusedError(finished_line(session_id))
        return session_id

    def model_of(self, model_id: str) -> ClientModel:
        """Return a model.

        Raises:
            RequestRefusedError: there is none.
        """
        if model_id not in self.models:
            raise RequestRefusedError(f"there is no model {model_id[:100]!r}", 404)
        return self.models[model_id]

    def sampler_of(self, sampler_id: str) -> Sampler:
        """Return a sampler.

        Raises:
            RequestRefusedError: there is none.
        """
        if sampler_id not in self.samplers:
            raise RequestRefusedError(f"there is no sampler {sampler_id[:100]!r}", 404)
        return self.samplers[sampler_id]

    def saved_model(self, path: str) -> ClientModel:
        """Return the model whose weights were saved, by their path."""
        return self.models[path.removeprefix("tinker://").partition("/")[0]]

    def saved_of(self, path: str, kind: str, *, expired: bool = False) -> SavedWeights:
        """Return saved weights by their path; expired ones only on request.

        Raises:
            InputError: there are none.
        """
        model_id, _, checkpoint = path.removeprefix("tinker://").partition("/")
        model = self.models.get(model_id)
        if not path.startswith("tinker://") or model is None:
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
        return self._parts.directory / "checkpoints" / "saved" / str(model.number) / str(sequence)


def finished_line(session_id: str) -> str:
    """Return why a finished session gets no more models and samplers."""
    return f"the session {session_id} has finished; create another"


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
