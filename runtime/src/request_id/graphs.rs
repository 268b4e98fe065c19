//! The ids of the requests whose graphs run in this process, which is a worker. Engine, scheduler and transfers know a
//! graph by its key alone. Their log lines name the key, and the writer of the line adds the id.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tutti_proto::{GraphId, GraphKey, Incarnation};

use super::XRequestId;

static RUNNING: Mutex<BTreeMap<GraphKey, XRequestId>> = Mutex::new(BTreeMap::new());

/// Notes that a graph of the request with this id runs here. An empty id is not noted.
pub fn graph_launched(key: GraphKey, id: &str) {
    if let Some(id) = XRequestId::parse(id) {
        RUNNING.lock().insert(key, id);
    }
}

/// Forgets all graphs, whose conductor is gone. The next one numbers requests from 1 again.
pub fn forget_graphs() {
    RUNNING.lock().clear();
}

/// Notes that a graph has ended.
pub fn graph_ended(key: GraphKey) {
    RUNNING.lock().remove(&key);
}

/// The id of a graph's request. The key may be that of the request's graph at another worker.
pub(crate) fn of_graph(key: GraphKey) -> Option<XRequestId> {
    let first = GraphKey { incarnation: Incarnation(0), graph: GraphId(0), ..key };
    let last = GraphKey { incarnation: Incarnation(u32::MAX), graph: GraphId(u32::MAX), ..key };
    RUNNING.lock().range(first..=last).next().map(|(_, id)| id.clone())
}
