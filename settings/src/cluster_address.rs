//! The address of a listener inside a cluster.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    Kind, socket_address,
    value::{self, Value, Written},
};

/// An address on which a conductor listens for processes of its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub enum ClusterAddress {
    /// `unix:/path`.
    Unix(PathBuf),
    /// `ip:port`, for processes on other machines.
    Tcp(SocketAddr),
}

impl FromStr for ClusterAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("unix: needs a path after it".into()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        socket_address::parse(text)
            .map(Self::Tcp)
            .map_err(|why| format!("is neither unix:/path nor ip:port: {why}"))
    }
}

impl TryFrom<Written> for ClusterAddress {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        written.text().parse()
    }
}

impl From<ClusterAddress> for String {
    fn from(address: ClusterAddress) -> Self {
        address.to_string()
    }
}

impl fmt::Display for ClusterAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

impl Value for ClusterAddress {
    const KIND: Kind = Kind::Parsed(value::parse::<Self>);

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}
