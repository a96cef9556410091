"""The interventions that exist. Nothing else lists them."""

from __future__ import annotations

from typing import Any

from nfold.interventions.communication.buffer_broadcast import BufferBroadcast
from nfold.interventions.communication.ddp_bucket_size import DdpBucketSize
from nfold.interventions.communication.ddp_static_graph import DdpStaticGraph
from nfold.interventions.communication.gradient_bucket_views import GradientBucketViews
from nfold.interventions.communication.gradient_compression import GradientCompression
from nfold.interventions.communication.gradient_exchange_mode import GradientExchangeMode
from nfold.interventions.communication.independent_ranks import IndependentRanks
from nfold.interventions.communication.micro_batch_exchange import MicroBatchExchange
from nfold.interventions.communication.nccl_algorithm import NcclAlgorithm
from nfold.interventions.communication.nccl_p2p import NcclP2p
from nfold.interventions.communication.nccl_protocol import NcclProtocol
from nfold.interventions.communication.nccl_shared_memory_off import NcclSharedMemoryOff
from nfold.interventions.communication.post_backward_exchange import PostBackwardExchange
from nfold.interventions.communication.synchronised_batch_norm import SynchronisedBatchNorm
from nfold.interventions.communication.unused_parameters import UnusedParameterSearch
from nfold.interventions.execution.anomaly_detection import AnomalyDetection
from nfold.interventions.execution.autocast_bf16 import AutocastBf16
from nfold.interventions.execution.channels_last import ChannelsLast
from nfold.interventions.execution.compiled_model import CompiledModel
from nfold.interventions.execution.cuda_graph_step import CudaGraphStep
from nfold.interventions.execution.cudnn_benchmark import CudnnBenchmark
from nfold.interventions.execution.expandable_segments import ExpandableSegments
from nfold.interventions.execution.fused_optimizer import FusedOptimizer
from nfold.interventions.execution.garbage_collection_frozen import GarbageCollectionFrozen
from nfold.interventions.execution.host_syncs import HostSyncs
from nfold.interventions.execution.kept_activations import ActivationCheckpointing
from nfold.interventions.execution.profiler_steps import ProfilerSteps
from nfold.interventions.execution.random_seed import RandomSeed
from nfold.interventions.execution.run_plan_fields import RunPlanFields
from nfold.interventions.execution.set_grads_to_none import SetGradsToNone
from nfold.interventions.execution.tf32_products import Tf32Products
from nfold.interventions.input.cached_input import CachedInput
from nfold.interventions.input.loader_in_order import LoaderInOrder
from nfold.interventions.input.loader_persistent_workers import LoaderPersistentWorkers
from nfold.interventions.input.loader_pin_memory import LoaderPinMemory
from nfold.interventions.input.loader_prefetch_factor import LoaderPrefetchFactor
from nfold.interventions.input.non_blocking_copies import NonBlockingCopies
from nfold.interventions.input.short_epochs import ShortEpochs
from nfold.interventions.input.unaugmented_images import AugmentedImages
from nfold.interventions.intervention import Intervention
from nfold.interventions.placement.core_pinning import CorePinning
from nfold.interventions.placement.rank_order import DataShares, DeviceOrder
from nfold.interventions.placement.restored_affinity import RestoredAffinity
from nfold.interventions.placement.single_device import SingleDevice
from nfold.interventions.placement.thread_count import ThreadCount


class Interventions:
    """The attributes of a Variant. New ones are appended: results name them in this order."""

    input = CachedInput()
    exchange = GradientExchangeMode()
    independent = IndependentRanks()
    device = SingleDevice()
    augmentation = AugmentedImages()
    synchronised_batch_norm = SynchronisedBatchNorm()
    captured = CudaGraphStep()
    threads = ThreadCount()
    pinned = CorePinning()
    devices = DeviceOrder()
    data_shares = DataShares()
    broadcast_buffers = BufferBroadcast()
    host_syncs = HostSyncs()
    anomaly_detection = AnomalyDetection()
    exchange_each_micro_batch = MicroBatchExchange()
    find_unused_parameters = UnusedParameterSearch()
    expandable_segments = ExpandableSegments()
    channels_last = ChannelsLast()
    compiled = CompiledModel()
    exchange_after_backward = PostBackwardExchange()
    profiler_steps = ProfilerSteps()
    batches_per_epoch = ShortEpochs()
    cudnn_benchmark = CudnnBenchmark()
    tf32 = Tf32Products()
    nccl_p2p = NcclP2p()
    gradient_as_bucket_view = GradientBucketViews()
    random_seed = RandomSeed()
    loader_pin_memory = LoaderPinMemory()
    loader_persistent_workers = LoaderPersistentWorkers()
    loader_prefetch_factor = LoaderPrefetchFactor()
    loader_in_order = LoaderInOrder()
    ddp_static_graph = DdpStaticGraph()
    ddp_bucket_mb = DdpBucketSize()
    nccl_shared_memory_off = NcclSharedMemoryOff()
    nccl_algorithm = NcclAlgorithm()
    nccl_protocol = NcclProtocol()
    fused_optimizer = FusedOptimizer()
    set_grads_to_none = SetGradsToNone()
    garbage_collection_frozen = GarbageCollectionFrozen()
    non_blocking_copies = NonBlockingCopies()
    autocast_bf16 = AutocastBf16()
    restored_affinity = RestoredAffinity()
    run_plan = RunPlanFields()
    gradient_compression = GradientCompression()
    activation_checkpointing = ActivationCheckpointing()


REGISTRY: dict[str, Intervention[Any]] = {
    name: found for name, found in vars(Interventions).items() if isinstance(found, Intervention)
}
"""The interventions by the name of their attribute."""
