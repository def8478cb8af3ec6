//! Where tokens come from: variables that the Azure SDKs use, too.

use std::fmt;
use std::path::PathBuf;

/// Where tokens come from.
#[derive(Clone, PartialEq, Eq)]
pub enum CredentialSource {
    /// An application or a managed identity that trusts a token in a file (AKS workload identity).
    Federated {
        /// URL of Microsoft Entra ID.
        authority: String,
        tenant: String,
        /// Client id of the identity.
        client: String,
        /// The token's file, read each time.
        token_file: PathBuf,
    },
    /// An application with a secret.
    Secret {
        /// URL of Microsoft Entra ID.
        authority: String,
        tenant: String,
        /// Client id of the application.
        client: String,
        secret: String,
    },
    /// A managed identity of the machine.
    Managed {
        /// URL of the metadata server.
        imds: String,
        /// Client id of a user-assigned identity; `None`: the system-assigned one.
        client: Option<String>,
    },
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        f.write_str(" { .. }")
    }
}

/// Microsoft Entra ID of the public cloud.
const AUTHORITY: &str = "https://login.microsoftonline.com";
/// Azure Resource Manager of the public cloud.
const MANAGEMENT: &str = "https://management.azure.com";

impl CredentialSource {
    /// The source that the environment names; without one, the machine's managed identity.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let authority = set("AZURE_AUTHORITY_HOST").unwrap_or_else(|| AUTHORITY.to_owned());
        let client = set("AZURE_CLIENT_ID");
        if let (Some(tenant), Some(client)) = (set("AZURE_TENANT_ID"), client.clone()) {
            if let Some(token_file) = set("AZURE_FEDERATED_TOKEN_FILE") {
                return Self::Federated { authority, tenant, client, token_file: token_file.into() };
            }
            if let Some(secret) = set("AZURE_CLIENT_SECRET") {
                return Self::Secret { authority, tenant, client, secret };
            }
        }
        Self::Managed { imds: "http://169.254.169.254".to_owned(), client }
    }

    /// Its name in logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Federated { .. } => "workload identity",
            Self::Secret { .. } => "client secret",
            Self::Managed { .. } => "managed identity",
        }
    }
}

/// URL of Azure Resource Manager in the cloud of an authority, which tokens are for, too.
pub(in crate::azure) fn management_of(authority: Option<&str>) -> &'static str {
    match authority {
        Some(url) if url.contains("login.chinacloudapi.cn") || url.contains("login.partner.microsoftonline.cn") => {
            "https://management.chinacloudapi.cn"
        }
        Some(url) if url.contains("login.microsoftonline.us") => "https://management.usgovcloudapi.net",
        _ => MANAGEMENT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(variables: &[(&str, &str)]) -> CredentialSource {
        CredentialSource::from_environment(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_federated_token_comes_before_a_secret_and_that_before_the_machine() {
        let all = [
            ("AZURE_TENANT_ID", "t"),
            ("AZURE_CLIENT_ID", "c"),
            ("AZURE_CLIENT_SECRET", "hidden"),
            ("AZURE_FEDERATED_TOKEN_FILE", "/f"),
        ];
        assert_eq!(source(&all).name(), "workload identity");
        assert_eq!(source(&all[..3]).name(), "client secret");
        assert!(matches!(source(&all[..2]), CredentialSource::Managed { client: Some(client), .. } if client == "c"));
        assert!(matches!(source(&all[2..]), CredentialSource::Managed { client: None, .. }));
        assert!(matches!(source(&[("AZURE_CLIENT_ID", "")]), CredentialSource::Managed { client: None, .. }));
        assert_eq!(format!("{:?}", source(&all[..3])), "client secret { .. }");
    }

    #[test]
    fn each_cloud_has_its_resource_manager() {
        assert_eq!(management_of(None), MANAGEMENT);
        assert_eq!(management_of(Some("https://login.microsoftonline.com/")), MANAGEMENT);
        assert_eq!(management_of(Some("https://login.microsoftonline.us/")), "https://management.usgovcloudapi.net");
        assert_eq!(management_of(Some("https://login.chinacloudapi.cn")), "https://management.chinacloudapi.cn");
    }
}
