"""TRL's synchronous trainer as its documentation configures it: generation by transformers, full weights."""

import importlib  # measured
from pathlib import Path

from progress import SETTINGS, trl_callback  # measured
from trl import GRPOConfig, GRPOTrainer

task = importlib.import_module(SETTINGS["task"])


output = Path(SETTINGS["output"])
trainer = GRPOTrainer(
    model=SETTINGS["model"],
    processing_class=task.tokenizer(SETTINGS["model"]),
    reward_funcs=task.exact,
    tools=task.tools,
    train_dataset=task.dataset(SETTINGS["tasks"]),
    args=GRPOConfig(
        output_dir=str(output),
        max_steps=SETTINGS["steps"],
        seed=SETTINGS["seed"],
        per_device_train_batch_size=SETTINGS["step_size"],
        num_generations=8,
        max_completion_length=SETTINGS["max_episode_tokens"],  # of all turns
        generation_kwargs={"max_new_tokens": SETTINGS["max_tokens"]},  # of a turn
        max_tool_calling_iterations=5,
        learning_rate=SETTINGS["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        loss_type="dapo",
        logging_steps=1,
        save_steps=SETTINGS["snapshot_every"],
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    ),
    callbacks=[trl_callback(episodes=SETTINGS["step_size"])],  # measured
)
trainer.train(resume_from_checkpoint=SETTINGS["resume"] and any(output.glob("checkpoint-*")))
