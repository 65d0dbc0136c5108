"""TRL's asynchronous trainer with a vLLM server that has the arguments in contenders.py."""

import importlib  # measured
from pathlib import Path

import trl_cpu_patch  # measured
from peft import LoraConfig
from progress import SETTINGS, trl_callback  # measured
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

task = importlib.import_module(SETTINGS["task"])


def main(weight_transfer=None):
    """Train, and send the adapter to the server, or what `weight_transfer` makes of it."""
    trl_cpu_patch.apply()  # measured
    output = Path(SETTINGS["output"])
    trainer = AsyncGRPOTrainer(
        model=SETTINGS["model"],
        processing_class=task.tokenizer(SETTINGS["model"]),
        reward_funcs=task.exact,
        tools=task.tools,
        train_dataset=task.dataset(SETTINGS["tasks"]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=AsyncGRPOConfig(
            output_dir=str(output),
            max_steps=SETTINGS["steps"],
            seed=SETTINGS["seed"],
            per_device_train_batch_size=SETTINGS["step_size"],
            token_budget=0,
            num_generations=8,
            max_completion_length=SETTINGS["max_tokens"],
            max_tool_calling_iterations=5,
            max_staleness=4,
            max_inflight_tasks=2 * SETTINGS["step_size"],
            vllm_server_base_url=SETTINGS["server"],
            learning_rate=SETTINGS["learning_rate"],
            adam_beta2=0.95,
            save_steps=SETTINGS["snapshot_every"],
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        weight_transfer=weight_transfer,
        callbacks=[trl_callback(episodes=SETTINGS["step_size"])],  # measured
    )
    trainer.train(resume_from_checkpoint=SETTINGS["resume"] and any(output.glob("checkpoint-*")))


if __name__ == "__main__":
    main()
