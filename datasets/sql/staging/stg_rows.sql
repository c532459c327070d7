-- stg_rows: every row read from a source, normalised, with the rule it breaks when it breaks one.
-- Grain: one row per source row.
--   pool_order     bigint   position of the source among all sources; earlier sources win over later ones
--   benchmark      varchar  name of the benchmark the row is for; null for training rows
--   source         varchar  where it stands in the recipe, and what it is
--   row_number     bigint   1 for the first row of the source (of a JSONL file: the line)
--   row_id         varchar  the source's own name for the row, spaces around it removed; null without one or when it is empty
--   question, answer, trace, family   varchar, spaces around them removed; trace is null without one
--   scale          bigint   length of the chain a solver needs; 0 when unknown
--   answer_type    varchar  how answers are graded (stages/rewards/tasks.py)
--   grading        varchar  what that needs beside the answer, a JSON object; null for nothing
--   row_text       varchar  the row as it was read: a line, or of a table the columns that the source names
--   normalised     varchar  question in lower case, every run of white space one space (open-r1)
--   reason         varchar  the rule the row breaks; null for a good row
with normalised as (
    select
        pool_order,
        benchmark,
        source,
        row_number,
        nullif(trim(row_id, e' \t\r\n'), '') as row_id,
        trim(question, e' \t\r\n') as question,
        trim(answer, e' \t\r\n') as answer,
        nullif(trim(trace, e' \t\r\n'), '') as trace,
        family,
        scale,
        row_text,
        unreadable,
        answer_type,
        grading,
        trim(regexp_replace(lower(question), '[\s\x0b\x1c-\x1f\x85\p{Z}]+', ' ', 'g')) as normalised
    from raw_rows
),

numbered as (
    select
        *,
        if(row_id is not null, first_value(row_number) over (partition by pool_order, row_id order by row_number), null) as first_row
    from normalised
),

final as (
    select
        numbered.* exclude (unreadable, first_row),
        case
            when unreadable is not null then unreadable
            when normalised is null then 'the question is missing'
            when normalised = '' then 'the question is empty'
            when answer is null then 'the answer is missing'
            when answer = '' then 'the answer is empty'
            when first_row < row_number then concat('the row id ', row_id, ' is that of row ', first_row)
            when length(question) > settings.max_characters or length(answer) > settings.max_characters
                then concat('question or answer is longer than ', settings.max_characters, ' characters')
            when answer_type = 'integer' and not regexp_full_match(answer, '[+-]?\d+') then 'the answer is no integer'
            when answer_type = 'number' and not coalesce(isfinite(try_cast(answer as double)), false) then 'the answer is no number'
        end as reason
    from numbered
    cross join settings
)

select * from final
