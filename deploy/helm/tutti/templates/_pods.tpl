{{/* What the pods of all parts have in common. */}}

{{- define "tutti.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int .Values.runAs.user }}
runAsGroup: {{ int .Values.runAs.group }}
fsGroup: {{ int .Values.runAs.group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "tutti.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* The termination grace period of a pod, in seconds. Takes the values below `drain`. */}}
{{- define "tutti.grace" -}}
{{- add (int .timeoutSeconds) (int .lameDuckSeconds) (int .preStopSeconds) (int .slackSeconds) -}}
{{- end -}}

{{/* Writable directories, and the caches below them. */}}
{{- define "tutti.homeEnv" -}}
- { name: HOME, value: /home/tutti }
- { name: XDG_CACHE_HOME, value: /home/tutti/cache }
{{- end -}}

{{- define "tutti.probes" -}}
startupProbe:
  httpGet: { path: /health, port: operations }
  periodSeconds: 2
  failureThreshold: {{ div (add (int .) 1) 2 }}
livenessProbe:
  httpGet: { path: /health, port: operations }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: { path: /ready, port: operations }
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 1
{{- end -}}

{{/* Flags of a process that clients reach. */}}
{{- define "tutti.frontFlags" -}}
{{- if .Values.tls.public.enabled }}
- --tls-cert=/etc/tutti/tls/tls.crt
- --tls-key=/etc/tutti/tls/tls.key
{{- end }}
{{- if include "tutti.apiKeySecret" . }}
- --api-key-file=/etc/tutti/keys/keys
{{- end }}
{{- end -}}

{{/* Flags of encryption inside the cluster. */}}
{{- define "tutti.clusterTlsFlags" -}}
{{- if and (include "tutti.networked" .) (eq .Values.tls.cluster.mode "none") }}
- --insecure-plaintext
{{- else if include "tutti.clusterTls" . }}
- --cluster-tls-cert=/etc/tutti/cluster-tls/tls.crt
- --cluster-tls-key=/etc/tutti/cluster-tls/tls.key
- --cluster-tls-ca=/etc/tutti/cluster-tls/ca.crt
{{- end }}
{{- end -}}

{{/* Mounts. Takes (dict root part front), where front is true if clients reach the process. */}}
{{- define "tutti.mounts" -}}
- { name: config, mountPath: /etc/tutti/config, readOnly: true }
{{- if include "tutti.networked" .root }}
- { name: cluster-token, mountPath: /etc/tutti/cluster, readOnly: true }
{{- end }}
{{- if include "tutti.clusterTls" .root }}
- { name: cluster-tls, mountPath: /etc/tutti/cluster-tls, readOnly: true }
{{- end }}
{{- if and .front .root.Values.tls.public.enabled }}
- { name: tls, mountPath: /etc/tutti/tls, readOnly: true }
{{- end }}
{{- if and .front (include "tutti.apiKeySecret" .root) }}
- { name: api-keys, mountPath: /etc/tutti/keys, readOnly: true }
{{- end }}
- { name: home, mountPath: /home/tutti }
- { name: tmp, mountPath: /tmp }
{{- end -}}

{{- define "tutti.volumes" -}}
- name: config
  configMap: { name: {{ include "tutti.fullname" .root }}-{{ .part }} }
{{- if include "tutti.networked" .root }}
- name: cluster-token
  secret: { secretName: {{ include "tutti.clusterTokenSecret" .root }}, defaultMode: 0440 }
{{- end }}
{{- if include "tutti.clusterTls" .root }}
- name: cluster-tls
  secret: { secretName: {{ include "tutti.clusterTlsSecret" (list .root .part) }}, defaultMode: 0440 }
{{- end }}
{{- if and .front .root.Values.tls.public.enabled }}
- name: tls
  secret: { secretName: {{ include "tutti.publicTlsSecret" .root }}, defaultMode: 0440 }
{{- end }}
{{- if and .front (include "tutti.apiKeySecret" .root) }}
- name: api-keys
  secret: { secretName: {{ include "tutti.apiKeySecret" .root }}, defaultMode: 0440 }
{{- end }}
- name: tmp
  emptyDir: {}
{{- end -}}

{{/* Where and how pods of a part are placed. Takes the part's values. */}}
{{- define "tutti.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "tutti.podBasics" -}}
serviceAccountName: {{ include "tutti.serviceAccount" . }}
# No part talks to Kubernetes.
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{ include "tutti.podSecurity" . | nindent 2 }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}
