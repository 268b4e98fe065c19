//! Limits on the connections of a process's listeners.

use std::time::Duration;

settings! {
    /// Limits on the connections of each listener.
    pub struct ConnectionSettings, table "connections", errors "connections." {
        "Connections" => {
            /// Open connections of one listener. At the limit the connection that has been idle for longest is closed.
            /// If none is idle, the new one is.
            max_open: u32 = 8192, unit "N", at least 1, changes live;
            /// Open connections of one listener from one IPv4 address, or one /64 network of IPv6.
            max_per_peer: u32 = 4096, unit "N", at least 1, changes live;
            /// Time in which a connection must send the whole head of a request, from its first byte on.
            header_timeout_ms: u32 = 15_000, unit "MS", at least 1, changes live;
            /// Time in which the TLS handshake of a connection must end.
            handshake_timeout_ms: u32 = 10_000, unit "MS", at least 1;
            /// Time after which a connection without a request is closed.
            idle_timeout_ms: u32 = 120_000, unit "MS", at least 1, changes live;
            /// Age at which a client's connection takes no new requests, plus up to a tenth. It ends when its last
            /// request ends. The client then opens another connection, which a load balancer may give to another
            /// process.
            max_age_s: u32 = 3_600, unit "SECONDS", at least 1, changes live;
            /// Time in which a peer must take at least one byte of the output that waits for it.
            write_timeout_ms: u32 = 30_000, unit "MS", at least 1;
            /// Interval of HTTP/2 pings. A connection that does not answer one within the same time is closed.
            keep_alive_ms: u32 = 15_000, unit "MS", at least 1;
            /// Requests in progress on one HTTP/2 connection.
            max_streams: u32 = 1024, unit "N", at least 1;
            /// Time in which a gRPC message must arrive whole: from its first byte, or from the start of the call for
            /// the call's first message.
            receive_timeout_ms: u32 = 30_000, unit "MS", at least 1;
            /// Bytes of incomplete gRPC messages that one listener holds. A message beyond them fails its call. One
            /// address holds at most half of the bytes, and all callers without a credential together a quarter.
            receive_room_bytes: usize = 256 << 20, unit "BYTES", at least 1;
        }
    }
}

impl ConnectionSettings {
    /// `header_timeout_ms` as a duration.
    pub fn header_timeout(&self) -> Duration {
        Duration::from_millis(self.header_timeout_ms.into())
    }

    /// `handshake_timeout_ms` as a duration.
    pub fn handshake_timeout(&self) -> Duration {
        Duration::from_millis(self.handshake_timeout_ms.into())
    }

    /// `idle_timeout_ms` as a duration.
    pub fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_timeout_ms.into())
    }

    /// `max_age_s` as a duration.
    pub fn max_age(&self) -> Duration {
        Duration::from_secs(self.max_age_s.into())
    }

    /// `write_timeout_ms` as a duration.
    pub fn write_timeout(&self) -> Duration {
        Duration::from_millis(self.write_timeout_ms.into())
    }

    /// `keep_alive_ms` as a duration.
    pub fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms.into())
    }

    /// `receive_timeout_ms` as a duration.
    pub fn receive_timeout(&self) -> Duration {
        Duration::from_millis(self.receive_timeout_ms.into())
    }
}
