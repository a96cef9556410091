# PPO the way single-file RL repositories write it for several GPUs: rollouts, then minibatch
# epochs; gradients are flattened and all-reduced by hand.
import argparse
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=400000)
    parser.add_argument("--local-num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=4)
    args = parser.parse_args()
    args.local_batch_size = args.local_num_envs * args.num_steps
    args.local_minibatch_size = args.local_batch_size // args.num_minibatches
    return args


class Grid:
    """Eight toy environments, frames of 42 x 42."""

    def __init__(self, n, seed):
        self.rng = np.random.default_rng(seed)
        self.n = n
        self.pos = self.rng.integers(0, 42, (n, 2))
        self.goal = self.rng.integers(0, 42, (n, 2))

    def _frame(self):
        x = np.zeros((self.n, 1, 42, 42), np.float32)
        for i in range(self.n):
            x[i, 0, self.pos[i, 0], self.pos[i, 1]] = 1.0
            x[i, 0, self.goal[i, 0], self.goal[i, 1]] = 0.5
        return x

    def reset(self):
        return self._frame()

    def step(self, a):
        move = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])
        self.pos = np.clip(self.pos + move[a], 0, 41)
        d = np.abs(self.pos - self.goal).sum(1)
        done = d < 3
        r = np.where(done, 1.0, -0.01)
        for i in np.nonzero(done)[0]:
            self.pos[i] = self.rng.integers(0, 42, 2)
        return self._frame(), r.astype(np.float32), done.astype(np.float32)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 3 * 3, 256), nn.ReLU())
        self.actor = nn.Linear(256, 4)
        self.critic = nn.Linear(256, 1)

    def get_value(self, x):
        return self.critic(self.network(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


if __name__ == "__main__":
    args = parse_args()
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    use_cuda = torch.cuda.is_available()
    if world_size > 1:
        dist.init_process_group("nccl" if use_cuda else "gloo")
    args.num_envs = args.local_num_envs * world_size
    args.num_updates = args.total_timesteps // (args.local_batch_size * world_size)
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    device = torch.device(f"cuda:{local_rank}" if use_cuda else "cpu")
    envs = Grid(args.local_num_envs, args.seed)
    agent = Agent().to(device)
    torch.manual_seed(args.seed)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    T, N = args.num_steps, args.local_num_envs
    obs = torch.zeros((T, N, 1, 42, 42)).to(device)
    actions = torch.zeros((T, N)).to(device)
    logprobs = torch.zeros((T, N)).to(device)
    rewards = torch.zeros((T, N)).to(device)
    dones = torch.zeros((T, N)).to(device)
    values = torch.zeros((T, N)).to(device)
    global_step = 0
    start_time = time.time()
    next_obs = torch.Tensor(envs.reset()).to(device)
    next_done = torch.zeros(N).to(device)
    for update in range(1, args.num_updates + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / args.num_updates) * args.learning_rate
        for step in range(T):
            global_step += args.num_envs
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob
            o, reward, done = envs.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_obs, next_done = torch.Tensor(o).to(device), torch.Tensor(done).to(device)
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards).to(device)
            last = 0
            for t in reversed(range(T)):
                nonterminal = 1.0 - (next_done if t == T - 1 else dones[t + 1])
                nextvalues = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + 0.99 * nextvalues * nonterminal - values[t]
                advantages[t] = last = delta + 0.99 * 0.95 * nonterminal * last
            returns = advantages + values
        b_obs = obs.reshape((-1, 1, 42, 42))
        b_logprobs, b_actions = logprobs.reshape(-1), actions.reshape(-1)
        b_adv, b_ret = advantages.reshape(-1), returns.reshape(-1)
        b_inds = np.arange(args.local_batch_size)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, args.local_batch_size, args.local_minibatch_size):
                mb = b_inds[start:start + args.local_minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                adv = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
                pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.9, 1.1)).mean()
                v = 0.5 * ((newvalue.view(-1) - b_ret[mb]) ** 2).mean()
                loss = pg - 0.01 * entropy.mean() + v * 0.5
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    grads = []
                    for p in agent.parameters():
                        if p.grad is not None:
                            grads.append(p.grad.view(-1))
                    grads = torch.cat(grads)
                    dist.all_reduce(grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for p in agent.parameters():
                        if p.grad is not None:
                            p.grad.data.copy_(grads[offset:offset + p.numel()].view_as(p.grad.data) / world_size)
                            offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if local_rank == 0:
            print(f"update {update} SPS: {int(global_step / (time.time() - start_time))}", flush=True)
