//! Listeners under attack: real sockets, and peers that send too little, too slowly, or do not read.

#![allow(clippy::unwrap_used)] // A failed unwrap is a failed test.

mod cluster_tls;
mod drain;
mod grpc;
mod http;
mod support;
mod tls;
mod unread;
