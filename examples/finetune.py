"""Fine-tunes a diffusers video transformer through sparse attention, all of it or a LoRA, on a folder of clips or of cached latents:

    accelerate launch examples/finetune.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --clips FOLDER --cache latents/ \\
        --loss distill --density 0.15 --steps 500 --lora 32 --output out/
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
import time
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import finetune_clips as data
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DiffusionPipeline
from finetune_noise import Noise, generate, save_grid
from safetensors.torch import load_file, save_file
from torch import nn

from ssta import SSTAConfig
from ssta.pipelines import Ramp, Schedule, apply_ssta, frozen_checkpoint, teacher_student

# What a training that is resumed must have in common with what it goes on with.
SAME = ("model", "loss", "few_steps", "density", "ramp", "compensation", "lora", "lora_targets", "rate", "warm_up", "accumulate",
        "drop_captions", "seed")
CHECKPOINTS_KEPT = 2


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        Training(options).run()
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="repository or folder of a text-to-video pipeline's weights")
    parser.add_argument("--clips", type=Path, metavar="FOLDER", help="clips to learn from, each with its caption beside, in a .txt")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", required=True,
                        help="where the clips' latents and text embeddings are kept; without --clips they are read from there")
    parser.add_argument("--size", default="81x480x832", help="frames, height and width that clips are cut to (default %(default)s)")
    parser.add_argument("--negative-prompt", default="", help="what samples are guided away from, and what stands for no caption")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for weights, checkpoints, samples and log.csv")
    parser.add_argument("--loss", choices=("diffusion", "distill"), default="distill",
                        help="against the clip's own velocity, or that of the frozen dense model (default %(default)s)")
    parser.add_argument("--few-steps", type=int, default=0, metavar="STEPS",
                        help="of a model for so few: learn where its dense generations come by (default 0: from clips at any noise level)")
    parser.add_argument("--density", type=float, default=0.15, help="share of the tile pairs that is computed (default %(default)s)")
    parser.add_argument("--ramp", type=int, metavar="STEPS",
                        help="in which the density falls from 1 (default a fifth of --steps, or with --resume as it was)")
    parser.add_argument("--compensation", choices=("none", "linear"), help="of what is left out; the family's if left out")
    parser.add_argument("--steps", type=int, default=500, help="of the optimizer (default %(default)s)")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train a LoRA of this rank; 0, the default, trains all weights")
    parser.add_argument("--lora-targets", default="to_q,to_k,to_v,to_out.0", help="modules that get one (default %(default)s)")
    parser.add_argument("--rate", type=float, help="learning rate (default 1e-4 for a LoRA, 1e-5 for all weights)")
    parser.add_argument("--warm-up", type=int, default=20, help="steps in which it rises (default %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="clips for each process and step (default %(default)s)")
    parser.add_argument("--drop-captions", type=float, default=0.1, help="share of clips without their caption (default %(default)s)")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of computing them again")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default %(default)s)")
    parser.add_argument("--precision", choices=("bf16", "no"), help="what is computed in (default bf16 on a GPU)")
    parser.add_argument("--sample-every", type=int, default=100, help="steps; 0 = no samples (default %(default)s)")
    parser.add_argument("--sample-steps", type=int, help="of denoising (default --few-steps, or 30)")
    parser.add_argument("--guidance", type=float, help="of the samples (default 5, with --few-steps 1, which is none)")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps (default %(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps (default %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--cpu", action="store_true", help="train without a GPU")
    options = parser.parse_args(arguments)
    for name in ("few_steps", "lora", "ramp", "warm_up", "sample_every"):
        if (getattr(options, name) or 0) < 0:
            parser.error(f"--{name.replace('_', '-')} must be at least 0, got {getattr(options, name)}")
    if options.few_steps and options.loss != "distill":
        parser.error("--few-steps needs --loss distill: it learns from the dense model, not from clips")
    if options.sample_steps is None:
        options.sample_steps = options.few_steps or 30
    if options.guidance is None:
        options.guidance = 1.0 if options.few_steps else 5.0
    for name in ("steps", "accumulate", "sample_steps", "checkpoint_every", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for name, least, most in (("density", 0, 1), ("drop_captions", -1e-9, 1)):
        if not least < getattr(options, name) <= most:
            parser.error(f"--{name.replace('_', '-')} must be a share of at most 1, got {getattr(options, name)}")
    if options.rate is None:
        options.rate = 1e-4 if options.lora else 1e-5
    if not 0 < options.rate < math.inf:
        parser.error(f"--rate must be positive, got {options.rate}")
    return options


def require_settings(fsdp: Any) -> None:
    """Raises ValueError where accelerate's FSDP is set up in a way that does not work here; None = no FSDP."""
    if fsdp is None:
        return
    reasons = {"fsdp_version": ("2", fsdp.fsdp_version == 2, "the first was not tried with it"),
               "fsdp_activation_checkpointing": ("false", not fsdp.activation_checkpointing,
                                                 "this script does its own, which keeps what was selected"),
               "fsdp_cpu_ram_efficient_loading": ("false", not fsdp.cpu_ram_efficient_loading,
                                                  "accelerate asks for what only models of transformers have")}
    for name, (wanted, fits, why) in reasons.items():
        if not fits:
            raise ValueError(f"{name} must be {wanted} in accelerate's settings, for {why}")


def _training(checkpoint: Path) -> dict[str, Any]:
    """How many steps a checkpoint has seen, and with which settings."""
    return json.loads((checkpoint / "training.json").read_text())


class Training:
    """One run, from the command line to the files."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.steps_done = 0
        size = data.Size.parse(options.size)
        files = data.clip_files(options.clips) if options.clips else data.cached_files(options.cache)
        self.folder = options.output / "checkpoints"
        self.last = self._last_checkpoint()
        if options.ramp is None:
            options.ramp = options.steps // 5 if self.last is None else _training(self.last)["settings"]["ramp"]
        precision = options.precision or ("bf16" if torch.cuda.is_available() and not options.cpu else "no")
        self.accelerator = accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=options.accumulate,
                                                     cpu=options.cpu)
        if accelerator.device.type == "cpu" and not options.cpu:
            raise ValueError("a CUDA GPU is needed for a model of this size; --cpu trains on the CPU all the same")
        require_settings(getattr(accelerator.state, "fsdp_plugin", None))
        set_seed(options.seed)
        self.dtype = torch.bfloat16 if precision == "bf16" and options.lora else torch.float32
        self.pipe = self._pipeline()
        if options.clips:
            share = slice(accelerator.process_index, None, accelerator.num_processes)
            # All but the transformer, which does not run.
            encoders = {name: part for name, part in self.pipe.components.items()
                        if isinstance(part, nn.Module) and name != "transformer"}
            for part in encoders.values():
                part.to(accelerator.device)
            files = data.encode(self.pipe, options.model, files, options.cache, size, options.negative_prompt, share, self.say)
            accelerator.wait_for_everyone()
            self.pipe.register_modules(**{name: None for name in encoders if name != "vae"})
        self.files = files
        negative = data.negative_file(options.cache)
        self.negative = None if negative is None else self._ready(negative)
        if self.negative is None and options.drop_captions and options.loss == "diffusion":
            raise ValueError(f"--drop-captions must be 0 where --cache has no {data.NEGATIVE}.safetensors, got {options.drop_captions}")
        self._prepare()

    def _pipeline(self) -> Any:
        """With its text encoders where there are clips to encode."""
        model, options = self.options.model, self.options
        parts = {} if options.clips else {name: None for name, part in DiffusionPipeline.load_config(model).items()
                                          if isinstance(part, (list, tuple)) and part[0] == "transformers"}
        self.say(f"loading {model}")
        pipe = DiffusionPipeline.from_pretrained(
            model, dtype={"transformer": self.dtype, "vae": torch.float32, "default": torch.bfloat16}, **parts)
        data.kind_of(pipe)
        if hasattr(pipe.vae, "enable_tiling"):
            pipe.vae.enable_tiling()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _prepare(self) -> None:
        """SSTA in the transformer, what is trained of it, the teacher, and what accelerate makes of all that."""
        options, transformer = self.options, self.pipe.transformer
        self.kind = type(transformer)
        teacher = None
        if options.lora:
            from peft import LoraConfig

            transformer.requires_grad_(False)
            transformer.add_adapter(LoraConfig(r=options.lora, lora_alpha=options.lora, init_lora_weights="gaussian",
                                               target_modules=options.lora_targets.split(",")))
            for parameter in transformer.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        else:
            transformer.requires_grad_(True)
            if options.loss == "distill":
                teacher = copy.deepcopy(transformer).requires_grad_(False).to(self.accelerator.device)
        changes = {} if options.compensation is None else {"compensation": options.compensation}
        self.handle = apply_ssta(transformer, schedule=Schedule(), **changes)
        self.ramp = Ramp(self.handle, options.density, options.ramp)
        if not options.no_checkpointing:
            transformer.enable_gradient_checkpointing(frozen_checkpoint)
        transformer.train()
        trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        self.say(f"training {sum(parameter.numel() for parameter in trained) / 1e6:.2f} M parameters on {len(self.files)} clips")
        self.model, self.optimizer = self.accelerator.prepare(
            transformer, torch.optim.AdamW(trained, lr=options.rate, betas=(0.9, 0.99), weight_decay=0.01))
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.velocities = teacher_student(self.model, teacher) if options.loss == "distill" else None
        if options.lora:
            # Not the weights, which are what they were. FSDP saves all of its shards.
            self.accelerator.register_save_state_pre_hook(self._save_adapter)
            self.accelerator.register_load_state_pre_hook(self._load_adapter)
        self.pipe.vae.to(self.accelerator.device)
        self.noise = Noise(self.pipe.scheduler, self._tokens())

    def _tokens(self) -> int:
        """Of the first clip's video."""
        sample = data.load_sample(self.files[0])
        context = self.handle.layers()[0][2]
        arguments = {"hidden_states": sample.latents, **sample.call}
        return math.prod(context.family.canvas(self.accelerator.unwrap_model(self.model), arguments))

    def run(self) -> None:
        options = self.options
        if self.last is not None:
            self._resume(self.last)
        self._sample()
        total, since, logged = torch.zeros((), device=self.accelerator.device), time.perf_counter(), self.steps_done
        for step in range(self.steps_done, options.steps):
            density = self.ramp.set(step)
            for group in self.optimizer.param_groups:
                group["lr"] = options.rate * min(1.0, (step + 1) / max(options.warm_up, 1))
            for turn in range(options.accumulate):
                with self.accelerator.accumulate(self.model):
                    loss = self._loss(step, turn)
                    total += loss.detach() / options.accumulate
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.trained, 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.steps_done = done = step + 1
            if done % options.log_every == 0 or done == options.steps:
                mean, now = float(self.accelerator.reduce(total, "mean")) / (done - logged), time.perf_counter()
                self._log(done, mean, density, (now - since) / (done - logged))
                total, since, logged = torch.zeros_like(total), now, done
            if done % options.checkpoint_every == 0:
                self._checkpoint()
            if options.sample_every and (done % options.sample_every == 0 or done == options.steps):
                self._sample()
        self._save()

    def _loss(self, step: int, turn: int) -> torch.Tensor:
        """Everything random follows from the seed, the step, the turn and the process, so that a run that goes on draws the same."""
        options, accelerator = self.options, self.accelerator
        place = (options.seed, step, turn, accelerator.process_index)
        draws = torch.Generator().manual_seed(random.Random(repr(place)).getrandbits(63))
        # Each clip once before any comes again.
        index = (step * options.accumulate + turn) * accelerator.num_processes + accelerator.process_index
        order = list(range(len(self.files)))
        random.Random(repr((options.seed, index // len(order)))).shuffle(order)
        sample = self._ready(self.files[order[index % len(order)]])
        call = sample.call
        if self.negative is not None and float(torch.rand((), generator=draws)) < options.drop_captions:
            call = self.negative.call
        noise = torch.randn(sample.latents.shape, generator=draws).to(accelerator.device)
        with accelerator.autocast():
            if options.few_steps:
                noisy, timestep = self._passed(noise, call, step, turn)
            else:
                noisy, timestep, target = self.noise.noised(sample.latents, noise, self.noise.level(draws))
            arguments = dict(call, hidden_states=noisy.to(self.dtype), timestep=timestep, return_dict=False)
            if self.velocities is not None:
                target, found = self.velocities(**arguments)
            else:
                found = self.model(**arguments)[0]
        return nn.functional.mse_loss(found.float(), target.float())

    def _passed(self, noise: torch.Tensor, call: dict[str, Any], step: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the dense model's own few steps from ``noise`` come by, and when."""
        velocities, count = self.velocities, self.options.few_steps
        assert velocities is not None, "--few-steps distils"

        def velocity(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return velocities.teacher(**call, hidden_states=x.to(self.dtype), timestep=time, return_dict=False).float()

        # The same number of forwards in every process, for weights may be in shards.
        number = random.Random(repr((self.options.seed, step, turn))).randrange(count)
        return next(islice(self.noise.passing(velocity, noise, count), number, None))

    def _ready(self, file: Path) -> data.Sample:
        return data.load_sample(file).to(self.accelerator.device, self.dtype)

    # Files

    def _last_checkpoint(self) -> Path | None:
        """The one to go on from."""
        options = self.options
        found = sorted(path.parent for path in self.folder.glob("*/training.json"))
        if not options.resume:
            if found:
                raise ValueError(f"--output {options.output} must be new, got one with checkpoints; --resume goes on with them")
            return None
        if not found:
            raise ValueError(f"--resume must find a checkpoint in --output {options.output}, got none")
        return found[-1]

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in SAME} | {"processes": self.accelerator.num_processes,
                                                                       "clips": [path.name for path in self.files]}

    def _resume(self, folder: Path) -> None:
        there = _training(folder)
        for name, value in self._settings().items():
            if there["settings"].get(name) != value:
                option = f"--{name.replace('_', '-')}" if name in SAME else name
                raise ValueError(f"--resume must go on with {option} {there['settings'].get(name)}, as in {folder}, got {value}")
        self.accelerator.load_state(str(folder))
        self.steps_done = there["steps"]
        log = self.options.output / "log.csv"
        if self.accelerator.is_main_process and log.is_file():
            # Without the steps that were lost.
            head, *rows = log.read_text().splitlines()
            kept = [row for row in rows if int(row.partition(",")[0]) <= self.steps_done]
            log.write_text("\n".join([head, *kept, ""]))
        self.say(f"going on from step {self.steps_done}")

    def _checkpoint(self) -> None:
        folder = self.folder / f"{self.steps_done:06d}"
        self.accelerator.save_state(str(folder))
        if self.accelerator.is_main_process:
            # Last, so that a folder that has it is whole.
            (folder / "training.json").write_text(json.dumps({"steps": self.steps_done, "settings": self._settings()}))
            for old in sorted(path.parent for path in self.folder.glob("*/training.json"))[:-CHECKPOINTS_KEPT]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def _save_adapter(self, models: list, weights: list, folder: str) -> None:
        from peft import get_peft_model_state_dict

        # FSDP has its own way, and none here.
        if weights and self.accelerator.is_main_process:
            save_file(get_peft_model_state_dict(self.accelerator.unwrap_model(models[0])), Path(folder) / "adapter.safetensors")
        weights.clear()

    def _load_adapter(self, models: list, folder: str) -> None:
        from peft import set_peft_model_state_dict

        while models:
            set_peft_model_state_dict(self.accelerator.unwrap_model(models.pop()), load_file(Path(folder) / "adapter.safetensors"))

    def _save(self) -> None:
        """As ``load_lora_weights`` or ``from_pretrained`` read it."""
        # Collective under FSDP.
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return
        output = self.options.output
        if self.options.lora:
            from peft import get_peft_model_state_dict

            adapter = get_peft_model_state_dict(self.accelerator.unwrap_model(self.model), state_dict=state)
            type(self.pipe).save_lora_weights(output, transformer_lora_layers={name: x.contiguous() for name, x in adapter.items()})
            self.say(f"{output}: pipe.load_lora_weights reads it")
        else:
            with torch.device("meta"):
                twin = self.kind.from_config(self.pipe.transformer.config)
            twin.load_state_dict(state, assign=True)
            twin.save_pretrained(output / "transformer")
            self.say(f"{output / 'transformer'}: {self.kind.__name__}.from_pretrained reads it")
        config, usual = self.handle.config, SSTAConfig()
        chosen = [f"{of.name}={value!r}" for of in fields(config)
                  if of.init and (value := getattr(config, of.name)) != getattr(usual, of.name)]
        self.say(f"trained for apply_ssta(pipe, SSTAConfig({', '.join(chosen)}), schedule=Schedule())")

    def _log(self, step: int, loss: float, density: float, seconds: float) -> None:
        if not math.isfinite(loss):
            raise ValueError(f"the loss must stay finite, got {loss} at step {step}; --rate {self.options.rate} may be too high")
        rate = self.optimizer.param_groups[0]["lr"]
        self.say(f"step {step} of {self.options.steps}: loss {loss:.5f}, density {density:.3g}, rate {rate:.2e}, {seconds:.2f} s a step")
        if self.accelerator.is_main_process:
            file = self.options.output / "log.csv"
            with file.open("a") as log:
                if not log.tell():
                    log.write("step,loss,density,rate,seconds\n")
                log.write(f"{step},{loss:.6g},{density:.6g},{rate:.6g},{seconds:.4g}\n")

    def _sample(self) -> None:
        """A picture of what the model makes of the first two clips' prompts; all processes compute it, for the weights may be in shards."""
        options = self.options
        self.options.output.mkdir(parents=True, exist_ok=True)
        if not options.sample_every:
            return
        self.ramp.set(self.steps_done)
        self.model.eval()
        grid = []
        for i, file in enumerate(self.files[:2]):
            sample = self._ready(file)
            with self.accelerator.autocast():
                latents = generate(self.model, self.noise, sample, self.negative, options.sample_steps, options.guidance, i, self.dtype)
            grid.append(data.Sample(latents, sample.call))
        self.model.train()
        if self.accelerator.is_main_process:
            path = options.output / "samples" / f"{self.steps_done:06d}.png"
            save_grid(self.pipe, grid, path)
            self.say(f"wrote {path}")

    def say(self, text: str) -> None:
        accelerator = getattr(self, "accelerator", None)
        if accelerator is None or accelerator.is_main_process:
            print(text, flush=True)


if __name__ == "__main__":
    main()
