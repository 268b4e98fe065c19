//! Formation of a TP group.

use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    time::Duration,
};

use tutti_engine::{EngineSettings, KvSize, kv_budget, profile};
use tutti_kernels::{
    collective::{Collective, GroupRank, SharedMemory, Tcp, Terms},
    cuda::{GroupId, GroupMeeting},
};
use tutti_models::{Model, lockstep};
use tutti_proto::cluster::v1::{self as pb, form_group};
use tutti_runtime::Error;
use tutti_settings::ByteSize;
use tutti_transfer::{Connector, Network};

/// Maximum wait for ranks that are still starting.
const STARTING_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum wait for ranks that are still loading. The conductor detects the death of a rank much sooner.
const LOADING_TIMEOUT: Duration = Duration::from_secs(3600);

/// The group of this rank, as the conductor describes it.
#[derive(Debug)]
pub struct Formation {
    group_rank: GroupRank,
    meeting: Meeting,
    /// The id of a group on GPUs; `None` if the group computes on CPUs.
    gpus: Option<GroupId>,
    /// Time limit of each collective operation.
    deadline: Duration,
    /// This worker's network, for connections to other workers.
    network: Network,
}

#[derive(Debug)]
enum Meeting {
    SharedMemory(PathBuf),
    Listen { listener: TcpListener, secret: [u8; 16] },
    Dial { leader: SocketAddr, secret: [u8; 16] },
}

impl Formation {
    /// Reads the conductor's message. The leader of a group over TCP starts to listen here. `id` is the id of a group
    /// on GPUs; the leader has created it, and the other ranks read it from the message.
    pub fn new(
        message: pb::FormGroup,
        deadline: Duration,
        network: Network,
        id: Option<GroupId>,
    ) -> Result<Self, Error> {
        let group_rank = GroupRank { rank: message.rank as usize, world_size: message.size as usize };
        let malformed = |what: &str| Error::internal(format!("the conductor's FormGroup lacks {what}"));
        let secret = |bytes: Vec<u8>| bytes.try_into().map_err(|_| malformed("a secret of 16 bytes"));
        let meeting = match message.meeting.ok_or_else(|| malformed("a meeting"))? {
            form_group::Meeting::SharedMemory(path) => Meeting::SharedMemory(path.into()),
            form_group::Meeting::Listen(listen) => {
                let listener = network
                    .bind()
                    .map_err(|e| Error::internal(format!("cannot listen for the group's ranks: {e}")))?;
                Meeting::Listen { listener, secret: secret(listen.secret)? }
            }
            form_group::Meeting::Dial(dial) => {
                let leader = dial.address.parse().map_err(|_| malformed("the leader's address"))?;
                Meeting::Dial { leader, secret: secret(dial.secret)? }
            }
        };
        let gpus = match &message.nccl_id[..] {
            [] => id,
            bytes => Some(GroupId::from_bytes(bytes).ok_or_else(|| malformed("an id of 128 bytes"))?),
        };
        Ok(Self { group_rank, meeting, gpus, deadline, network })
    }

    /// Returns the leader's `GroupListening` message, which the conductor passes to the other ranks; `None` on any
    /// other rank.
    pub fn listening(&self) -> Result<Option<pb::GroupListening>, Error> {
        if !self.leads() {
            return Ok(None);
        }
        let port = match &self.meeting {
            Meeting::Listen { listener, .. } => listener
                .local_addr()
                .map_err(|e| Error::internal(format!("the group's listener has no address: {e}")))?
                .port(),
            Meeting::SharedMemory(_) | Meeting::Dial { .. } => 0,
        };
        let nccl_id = self.gpus.map(|id| id.as_bytes().to_vec()).unwrap_or_default();
        Ok(Some(pb::GroupListening { port: port.into(), nccl_id }))
    }

    /// Path at which the ranks meet if they are on one machine.
    pub fn meeting_path(&self) -> Option<&Path> {
        match &self.meeting {
            Meeting::SharedMemory(path) => Some(path),
            Meeting::Listen { .. } | Meeting::Dial { .. } => None,
        }
    }

    /// True if this rank is the leader.
    pub fn leads(&self) -> bool {
        self.group_rank.is_leader()
    }

    /// Forms the group of CPU ranks for collective operations. The conductor has already asked all ranks to join this
    /// group.
    pub fn for_cpus(&self) -> Result<Box<dyn Collective>, Error> {
        match self.gpus {
            None => self.meet("data", STARTING_TIMEOUT),
            Some(_) => Err(mixed("a GPU", "a CPU")),
        }
    }

    /// Returns what the devices of this rank need to form the group of GPUs.
    pub fn for_gpus(&self) -> Result<GroupMeeting, Error> {
        let Self { group_rank, gpus, deadline, .. } = self;
        let id = gpus.ok_or_else(|| mixed("a CPU", "a GPU"))?;
        Ok(GroupMeeting { id, group_rank: *group_rank, patience: STARTING_TIMEOUT, deadline: *deadline })
    }

    /// Waits until all ranks have loaded, and forms the group that carries the leader's plans.
    fn for_plans(&self) -> Result<Box<dyn Collective>, Error> {
        self.meet("plans", LOADING_TIMEOUT)
    }

    fn meet(&self, what: &str, patience: Duration) -> Result<Box<dyn Collective>, Error> {
        let Self { group_rank, meeting, deadline, network, .. } = self;
        let terms = |secret| Terms { secret, patience, deadline: *deadline, links: network };
        let group: Result<Box<dyn Collective>, _> = match meeting {
            Meeting::SharedMemory(path) => {
                SharedMemory::meet(&path.with_extension(what), *group_rank, patience, *deadline)
                    .map(|group| Box::new(group) as _)
            }
            Meeting::Listen { listener, secret } => {
                Tcp::accept(listener, group_rank.world_size, &terms(secret)).map(|group| Box::new(group) as _)
            }
            Meeting::Dial { leader, secret } => {
                Tcp::connect(*leader, *group_rank, &terms(secret)).map(|group| Box::new(group) as _)
            }
        };
        let GroupRank { rank, world_size: size } = *group_rank;
        let group = group.map_err(|e| Error::internal(format!("cannot form a group of {size}: {e}")))?;
        tracing::info!(
            group_rank = rank,
            group_size = size,
            transport = group.transport(),
            what,
            "group formed"
        );
        Ok(group)
    }

    /// Waits until all ranks have loaded. If their devices have memory of their own, all ranks then run the largest
    /// step at the same time. The ranks agree on one size of the KV pool: the smallest budget of any rank. `share` is
    /// this rank's share of its machine's memory (see [`kv_budget`]).
    pub fn join(
        &self,
        mut model: Box<dyn Model>,
        settings: &EngineSettings,
        share: Option<u64>,
    ) -> Result<Member, Error> {
        let mut plans = self.for_plans()?;
        profile(&mut *model, settings, self.group_rank)?;
        let budget = kv_budget(&*model, settings, share);
        let mut all = Vec::new();
        plans
            .all_gather(&budget.to_le_bytes(), &mut all)
            .map_err(|e| Error::internal(format!("cannot agree on the KV pool's size: {e}")))?;
        let least = all.as_chunks::<8>().0.iter().map(|budget| u64::from_le_bytes(*budget)).min();
        let kv_cache_memory = Some(ByteSize(least.unwrap_or(budget)));
        let settings = EngineSettings { kv_cache_memory, ..settings.clone() };
        let kv = KvSize::choose(&*model, &settings)?;
        Ok(Member { model, plans, settings, kv, leader: self.leader() })
    }

    /// Host at which this rank reaches its leader.
    fn leader(&self) -> IpAddr {
        match &self.meeting {
            Meeting::Dial { leader, .. } => leader.ip(),
            // Ranks that share memory are on one machine, so the conductor sees all of them at one address.
            Meeting::SharedMemory(_) | Meeting::Listen { .. } => self.network.host,
        }
    }
}

/// Returns the error of a group whose ranks have different kinds of devices.
fn mixed(leader: &str, own: &str) -> Error {
    let why = format!("the leader of this rank's group computes on {leader}, and this rank on {own}");
    Error::invalid("device", why)
}

/// A rank of a complete group.
pub struct Member {
    model: Box<dyn Model>,
    plans: Box<dyn Collective>,
    /// The engine's settings, with the budget on which the ranks have agreed.
    settings: EngineSettings,
    kv: KvSize,
    leader: IpAddr,
}

impl Member {
    /// Size of the KV pool on each rank.
    pub fn kv(&self) -> KvSize {
        self.kv
    }

    /// This rank and the size of its group.
    pub fn group_rank(&self) -> GroupRank {
        self.plans.group_rank()
    }

    /// Host at which this rank reaches its leader.
    pub fn leader(&self) -> IpAddr {
        self.leader
    }

    /// This rank's share of the model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Returns the whole group as one model, and settings with the budget that the ranks agreed on.
    pub fn lead(self) -> (Box<dyn Model>, EngineSettings) {
        (Box::new(lockstep::Leader::new(self.model, self.plans)), self.settings)
    }

    /// Runs the leader's plans until the leader leaves. `connector` exchanges this rank's shares of requests. After
    /// each forward pass, calls `ran` with the number of forward passes so far.
    pub fn follow(mut self, connector: &mut dyn Connector, ran: impl FnMut(u64)) -> Result<(), Error> {
        lockstep::follow(&mut *self.model, &mut *self.plans, connector, ran)
            .map_err(|e| Error::internal(format!("this rank can no longer follow its leader: {e}")))
    }
}

#[cfg(test)]
mod tests;
