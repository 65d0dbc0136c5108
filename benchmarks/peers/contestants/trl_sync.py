"""TRL's synchronous trainer as its documentation configures it: generation by transformers, full weights."""

from pathlib import Path

from progress import SETTINGS, trl_callback  # measured
from trl import GRPOConfig, GRPOTrainer
from trl_calculator import calculate, dataset, exact, tokenizer

output = Path(SETTINGS["output"])
trainer = GRPOTrainer(
    model=SETTINGS["model"],
    processing_class=tokenizer(SETTINGS["model"]),
    reward_funcs=exact,
    tools=[calculate],
    train_dataset=dataset(SETTINGS["tasks"]),
    args=GRPOConfig(
        output_dir=str(output),
        max_steps=SETTINGS["steps"],
        seed=SETTINGS["seed"],
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=120,
        max_tool_calling_iterations=5,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        loss_type="dapo",
        logging_steps=1,
        save_steps=3,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    ),
    callbacks=[trl_callback(episodes=64)],  # measured
)
trainer.train(resume_from_checkpoint=SETTINGS["resume"] and any(output.glob("checkpoint-*")))
