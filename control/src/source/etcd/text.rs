//! Keys and values of etcd are bytes; names and texts are UTF-8.

use std::collections::BTreeMap;
use std::sync::Arc;

use etcd_client::{Event, EventType};

use crate::source::Update;

/// What stands under a name, or why it can't be read.
pub(super) type Text = (Arc<str>, Result<String, String>);

/// The text of a key and its value.
pub(super) fn text(key: &[u8], value: Vec<u8>) -> Text {
    let readable = match str::from_utf8(key) {
        Err(error) => Err(format!(
            "the key isn't UTF-8 (byte {}): delete it, keys are the prefix and kind/namespace/name",
            error.valid_up_to()
        )),
        Ok(_) => String::from_utf8(value).map_err(|error| {
            let place = error.utf8_error().valid_up_to();
            format!("the value isn't UTF-8 (byte {place}): put YAML there")
        }),
    };
    (name(key), readable)
}

/// What the events of one response come to.
pub(super) fn update(events: &[Event]) -> Update {
    let mut last = BTreeMap::new();
    // Each has a key: it is the key that is watched.
    for (event, pair) in events.iter().filter_map(|event| Some((event, event.kv()?))) {
        let (name, text) = match event.event_type() {
            EventType::Put => {
                let (name, text) = text(pair.key(), pair.value().to_vec());
                (name, Some(text))
            }
            EventType::Delete => (name(pair.key()), None),
        };
        last.insert(name, text);
    }
    let mut update = Update::default();
    for (name, text) in last {
        match text {
            Some(text) => update.changed.push((name, text)),
            None => update.gone.push(name),
        }
    }
    update
}

fn name(key: &[u8]) -> Arc<str> {
    String::from_utf8_lossy(key).into()
}
