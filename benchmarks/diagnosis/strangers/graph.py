# Node classification on one graph, full batch, in the usual shape.
import time
import torch
import torch.nn as nn
import torch.nn.functional as F


def load(n=3000, f=500, e=20000, classes=7):
    g = torch.Generator().manual_seed(1)
    edges = torch.randint(0, n, (2, e), generator=g)
    edges = torch.cat([edges, edges.flip(0), torch.arange(n).repeat(2, 1)], 1)
    adj = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (n, n)).coalesce()
    deg = torch.sparse.sum(adj, 1).to_dense().pow(-0.5)
    v = adj.values() * deg[adj.indices()[0]] * deg[adj.indices()[1]]
    adj = torch.sparse_coo_tensor(adj.indices(), v, (n, n)).coalesce()
    x = (torch.rand(n, f, generator=g) < 0.02).float()
    y = torch.randint(0, classes, (n,), generator=g)
    return adj, x, y, torch.arange(140), torch.arange(200, 500)


class GraphConvolution(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(i, o) * 0.05)
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x, adj):
        return torch.spmm(adj, x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, f, h, c, dropout):
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConvolution(f, h), GraphConvolution(h, c), dropout

    def forward(self, x, adj):
        x = F.dropout(F.relu(self.gc1(x, adj)), self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), 1)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
adj, features, labels, idx_train, idx_val = load()
model = GCN(features.shape[1], 16, 7, 0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
model.to(device)
features, adj, labels = features.to(device), adj.to(device), labels.to(device)
idx_train, idx_val = idx_train.to(device), idx_val.to(device)


def accuracy(o, y):
    return (o.argmax(1) == y).double().mean()


def train(epoch):
    t = time.time()
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    acc = accuracy(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    model.eval()
    output = model(features, adj)
    loss_val = F.nll_loss(output[idx_val], labels[idx_val])
    print(f"Epoch: {epoch + 1:04d} loss_train: {loss.item():.4f} acc_train: {acc.item():.4f} "
          f"loss_val: {loss_val.item():.4f} time: {time.time() - t:.4f}s")


for epoch in range(2000):
    train(epoch)
