//! Services of the store: assembled from their resources and backend slices, in force and staged.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use vipgate_policy::compiler::PlacedService;

use super::{ResourceStore, StageError, StoredResource, decode};
use crate::xds::resource::slices::{BackendSlice, ServiceResource, parse_name, slice_key, sort_backends};
use crate::xds::resource::{Decoded, Key, Kind};

impl ResourceStore {
    /// Checks that the slices of each staged Service are there after the update.
    ///
    /// # Errors
    /// The resource that is missing, or too many.
    pub fn check_consistency(&self) -> Result<(), StageError> {
        self.staged_services().iter().try_for_each(|name| {
            let service = self.service_resource(name);
            let slices = service.as_ref().map_or(0, |service| service.slices);
            if let Some(key) = self.slice_keys_after(name).find(|key| number(key).is_none_or(|it| it >= slices)) {
                let reason = match &service {
                    Some(_) => format!("its Service has {slices} backend slices"),
                    None => "there is no such Service".to_owned(),
                };
                return Err(StageError::Inconsistent { key, reason });
            }
            service.map_or(Ok(()), |service| self.assemble(&service).map(drop))
        })
    }

    /// The Services of which the Service itself or a slice differs after the update, and that may be gone then.
    pub(super) fn staged_services(&self) -> BTreeSet<Arc<str>> {
        let name = |key: &Key| match key.kind {
            Kind::Service => Some(key.name.clone()),
            Kind::BackendSlice => parse_name(&key.name).map(|(service, _)| service.into()),
            _ => None,
        };
        self.differing().filter_map(|(key, _)| name(key)).collect()
    }

    /// A Service after the update, with all its backends; without backends if slices are missing.
    pub(super) fn service_after(&self, name: &Arc<str>) -> Option<PlacedService> {
        let service = self.service_resource(name)?;
        Some(self.assemble(&service).unwrap_or(service.service))
    }

    /// The Service with the backends of its slices.
    fn assemble(&self, resource: &ServiceResource) -> Result<PlacedService, StageError> {
        let mut service = resource.service.clone();
        for number in 0..resource.slices {
            let key = slice_key(&service.name, number);
            let Some(slice) = self.slice(&key) else {
                let key = Key { kind: Kind::Service, name: service.name };
                let reason = format!("has {} backend slices, but number {number} is missing", resource.slices);
                return Err(StageError::Inconsistent { key, reason });
            };
            let BackendSlice { backends, more_backends, .. } = slice.into_owned();
            service.backends.extend(backends);
            service.backends.extend(more_backends);
        }
        sort_backends(&mut service.backends);
        Ok(service)
    }

    /// The resource of a Service after the update.
    fn service_resource(&self, name: &Arc<str>) -> Option<ServiceResource> {
        match self.decoded_after(&Key { kind: Kind::Service, name: name.clone() })?.into_owned() {
            Decoded::Service(service) => Some(service),
            _ => None,
        }
    }

    fn slice(&self, key: &Key) -> Option<Cow<'_, BackendSlice>> {
        match self.decoded_after(key)? {
            Cow::Borrowed(Decoded::BackendSlice(slice)) => Some(Cow::Borrowed(slice)),
            Cow::Owned(Decoded::BackendSlice(slice)) => Some(Cow::Owned(slice)),
            _ => None,
        }
    }

    /// A resource after the update.
    fn decoded_after(&self, key: &Key) -> Option<Cow<'_, Decoded>> {
        if let Some(staged) = self.staged.get(key) {
            return staged.as_ref().map(|staged| Cow::Borrowed(&staged.decoded));
        }
        let StoredResource { body, .. } = self.resources.get(key)?;
        // Resources in force have been decoded before: this can't fail.
        decode(key.kind, &key.name, body).ok().map(Cow::Owned)
    }

    /// The keys of a Service's slices after the update.
    fn slice_keys_after<'a>(&'a self, service: &str) -> impl Iterator<Item = Key> + use<'a> {
        let prefix: Arc<str> = format!("{service}#").into();
        let first = Key { kind: Kind::BackendSlice, name: prefix.clone() };
        let is_of = move |key: &Key| key.kind == Kind::BackendSlice && key.name.starts_with(&*prefix);
        let (of_staged, of_stored) = (is_of.clone(), is_of);
        let staged = self.staged.range(first.clone()..).take_while(move |(key, _)| of_staged(key));
        let stored = self.resources.range(first..).take_while(move |(key, _)| of_stored(key));
        let stored = stored.filter(|(key, _)| !self.staged.contains_key(*key)).map(|(key, _)| key.clone());
        staged.filter(|(_, staged)| staged.is_some()).map(|(key, _)| key.clone()).chain(stored)
    }
}

fn number(key: &Key) -> Option<u32> {
    parse_name(&key.name).map(|(_, number)| number)
}
