//! Entry points of the fuzzers (`tests/fuzzing`). A check that fails is a finding.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use tutti_proto::cluster::v1::{self as pb, form_group::Meeting};
use tutti_settings::WorkerSettings;

use crate::group::Formation;

/// Reads a conductor's welcome and the formation of a group.
pub fn conductor_message(message: pb::ConductorMessage) {
    use pb::conductor_message::Message;
    match message.message {
        Some(Message::Welcome(welcome)) => {
            let settings = serde_json::from_str::<WorkerSettings>(&welcome.settings_json);
            if let Ok(settings) = settings {
                let json = serde_json::to_string(&settings).expect("settings are JSON");
                let again = serde_json::from_str::<WorkerSettings>(&json).expect("settings are read back");
                assert_eq!(serde_json::to_string(&again).ok(), Some(json));
            }
        }
        // A group whose meeting is `Listen` is skipped, because its formation would take a port.
        Some(Message::FormGroup(group)) if !matches!(group.meeting, Some(Meeting::Listen(_))) => {
            let network = IpAddr::from(Ipv4Addr::LOCALHOST).into();
            if let Ok(group) = Formation::new(group, Duration::from_secs(1), network, None) {
                let listening = group.listening().expect("no listener is asked");
                assert_eq!(listening.is_some(), group.leads());
            }
        }
        _ => {}
    }
}
