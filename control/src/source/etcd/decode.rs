//! Decoding of etcd keys and values, which are bytes, to UTF-8.

use std::collections::BTreeMap;
use std::sync::Arc;

use etcd_client::{Event, EventType};

use crate::source::{EntryContent, SourceUpdate};

/// The name of an entry and its content, or why it can't be read.
pub(super) type DecodedEntry = (Arc<str>, Result<EntryContent, String>);

/// Decodes a key-value pair.
pub(super) fn decode_pair(key: &[u8], value: Vec<u8>) -> DecodedEntry {
    let result = match str::from_utf8(key) {
        Err(error) => Err(format!(
            "the key isn't UTF-8 (byte {}): delete it; a key is the prefix and kind/namespace/name",
            error.valid_up_to()
        )),
        Ok(_) => String::from_utf8(value).map_err(|error| {
            format!("the value isn't UTF-8 (byte {}): it must be YAML", error.utf8_error().valid_up_to())
        }),
    };
    (name(key), result.map(EntryContent::Text))
}

/// The update of one watch response: the last event of each key.
pub(super) fn decode_events(events: &[Event]) -> SourceUpdate {
    let mut last = BTreeMap::new();
    // Events of a watch always have a key.
    for (event, pair) in events.iter().filter_map(|event| Some((event, event.kv()?))) {
        let (name, text) = match event.event_type() {
            EventType::Put => {
                let (name, text) = decode_pair(pair.key(), pair.value().to_vec());
                (name, Some(text))
            }
            EventType::Delete => (name(pair.key()), None),
        };
        last.insert(name, text);
    }
    let mut update = SourceUpdate::default();
    for (name, text) in last {
        match text {
            Some(text) => update.changed.push((name, text)),
            None => update.removed.push(name),
        }
    }
    update
}

fn name(key: &[u8]) -> Arc<str> {
    String::from_utf8_lossy(key).into()
}
