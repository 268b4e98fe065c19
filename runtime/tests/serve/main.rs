//! Listeners under attack: real sockets, and peers that send too little, too slowly, or do not read.

mod grpc;
mod http;
mod support;
