//! The end of a process. The first SIGINT or SIGTERM drains it, and the second ends it at once. SIGHUP does not end it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::Error;

/// Exit status after a second signal. Shells report it for a process that SIGINT has killed.
const INTERRUPTED: i32 = 130;

/// Signals the drain to a process's components. Clones share one state.
#[derive(Clone, Debug)]
pub struct Shutdown {
    draining: watch::Sender<bool>,
    gentle: Arc<AtomicBool>,
}

/// Installs a handler of SIGHUP, which would otherwise end the process. Call this before anything else, because SIGHUP
/// may arrive at any time after the process starts. A SIGHUP that arrives before [`crate::reload::Reload`] listens is
/// not lost: `Reload` notices that the file has changed since it was read.
pub fn outlive_hangups() -> Result<(), Error> {
    let failed = |e| Error::internal(format!("cannot listen for SIGHUP: {e}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let _context = runtime.enter();
    // The handler stays installed after the receiver and the runtime are dropped.
    signal(SignalKind::hangup()).map(drop).map_err(failed)
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { draining: watch::Sender::new(false), gentle: Arc::default() }
    }
}

impl Shutdown {
    /// A shutdown that begins on SIGINT or SIGTERM. Must be called inside a Tokio runtime.
    pub fn on_signals() -> Result<Self, Error> {
        let listen =
            |kind| signal(kind).map_err(|e| Error::internal(format!("cannot listen for signals: {e}")));
        let (mut interrupt, mut terminate) =
            (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        let shutdown = Self::default();
        let trigger = shutdown.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if trigger.is_draining() {
                    tracing::warn!("second signal: ending at once");
                    std::process::exit(INTERRUPTED);
                }
                tracing::info!("draining; a second signal ends at once");
                trigger.begin();
            }
        });
        Ok(shutdown)
    }

    /// Starts the drain.
    pub fn begin(&self) {
        self.draining.send_replace(true);
    }

    /// Starts the drain of a process whose clients may be about to send requests over open connections.
    pub fn begin_gently(&self) {
        self.gentle.store(true, Relaxed);
        self.begin();
    }

    /// True once the drain has begun by [`Shutdown::begin_gently`].
    pub fn is_gentle(&self) -> bool {
        self.gentle.load(Relaxed)
    }

    /// True once the drain has begun.
    pub fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Completes once the drain begins.
    pub async fn begun(&self) {
        let mut state = self.draining.subscribe();
        // The sender lives in self, so this cannot fail while self is borrowed.
        let _ = state.wait_for(|draining| *draining).await;
    }
}
